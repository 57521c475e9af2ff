"""Know models of transformers without importing any: how they change logits, what was compared, attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.errors import meant


@dataclass(frozen=True, slots=True)
class HeadFields:
    """Name the fields of a Hugging Face config by which a model changes its logits z behind the head.

    z' = z * config[factor] or z / config[divisor], then z'' = config[cap] * tanh(z' / config[cap]).
    """

    factor: str = ""
    divisor: str = ""
    cap: str = ""

    @property
    def fields(self) -> set[str]:
        return {self.factor, self.divisor, self.cap} - {""}


_CAPPED = HeadFields(cap="final_logit_softcapping")
_SCALED = HeadFields(factor="logit_scale")
_DIVIDED = HeadFields(divisor="logits_scaling")

HEAD_MATH: dict[str, HeadFields] = {
    "gemma2": _CAPPED,
    "gemma3_text": _CAPPED,
    "gemma3n_text": _CAPPED,
    "gemma4_text": _CAPPED,
    "gemma4_unified_text": _CAPPED,
    "vaultgemma": _CAPPED,
    "nanochat": _CAPPED,
    "recurrent_gemma": HeadFields(cap="logits_soft_cap"),
    "cohere": _SCALED,
    "cohere2": _SCALED,
    "cohere2_moe": _SCALED,
    "granite": _DIVIDED,
    "granite_swa": _DIVIDED,
    "granitemoe": _DIVIDED,
    "granitemoe_swa": _DIVIDED,
    "granitemoeshared": _DIVIDED,
    "granitemoehybrid": _DIVIDED,
    "minicpm3": _DIVIDED,
    "hyperclovax": HeadFields(factor="logits_scaling"),
    "falcon_h1": HeadFields(factor="lm_head_multiplier"),
}
"""model_type (of the text part) -> its formula, as in its forward in transformers."""

NESTED = {"gemma3n", "gemma4", "gemma4_unified"}
"""model_type of models around a text model that apply the formula of its config. Others (Gemma 3's among them, in
transformers) apply none, whatever the config of their text model says."""


def head_fields(model_type: str, text_type: str) -> HeadFields:
    """Return the fields of its text config that a model of `model_type` applies; its text part is of `text_type`."""
    return HEAD_MATH.get(text_type, HeadFields()) if model_type in NESTED | {text_type} else HeadFields()


HEAD_FIELDS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
    "unpadded_vocab_size",
)
"""All such fields of any model. A model that sets a field outside its formula is refused."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Describe an architecture for which trainer, plain transformers and vLLM gave the same log-probs.

    They agreed to 1e-5 in fp32 on CPUs, from the directory and after an update of all weights: `pytest -m ""
    tests/trainer/test_architectures.py tests/engine/test_architectures.py`.
    """

    model_type: str
    note: str = ""  # what was in the comparison beyond the plain model, or what it needs here
    window_differs: bool = False  # transformers and vLLM disagree about the first token in its sliding window


COMPARED: dict[str, Compared] = {
    "Qwen2ForCausalLM": Compared("qwen2"),
    "Qwen3ForCausalLM": Compared("qwen3"),
    "LlamaForCausalLM": Compared("llama"),
    "MistralForCausalLM": Compared("mistral", "sliding window"),
    "GemmaForCausalLM": Compared("gemma"),
    "Gemma2ForCausalLM": Compared("gemma2", "soft caps of logits and attention scores (eager attention), window"),
    "Gemma3ForCausalLM": Compared("gemma3_text", "soft cap of logits, window in every other layer"),
    "Phi3ForCausalLM": Compared("phi3", "longrope: data.max_len chooses its factors, for all texts of the run"),
    "OlmoForCausalLM": Compared("olmo"),
    "Olmo2ForCausalLM": Compared("olmo2"),
    "GraniteForCausalLM": Compared("granite", "all four multipliers"),
    "CohereForCausalLM": Compared("cohere", "logit_scale"),
    "Cohere2ForCausalLM": Compared("cohere2", "logit_scale; texts up to its sliding window", window_differs=True),
    "GPTNeoXForCausalLM": Compared("gpt_neox"),
    "Qwen2MoeForCausalLM": Compared("qwen2_moe", "experts fused in memory"),
    "Qwen3MoeForCausalLM": Compared("qwen3_moe", "experts fused in memory"),
    "MixtralForCausalLM": Compared("mixtral", "experts fused in memory, router noise off"),
    "OlmoeForCausalLM": Compared("olmoe", "experts fused in memory"),
    "GraniteMoeForCausalLM": Compared("granitemoe", "experts fused in memory, logits_scaling"),
    "OPTForCausalLM": Compared("opt", "dropout off"),
    "FalconForCausalLM": Compared("falcon", "dropout off"),
    "BloomForCausalLM": Compared("bloom", "dropout off, eager attention, vLLM with the tanh form of GELU"),
    "Starcoder2ForCausalLM": Compared("starcoder2", "dropout off, sliding window"),
    "GPTBigCodeForCausalLM": Compared("gpt_bigcode", "dropout off"),
    "GPT2LMHeadModel": Compared("gpt2", "dropout off"),
    "GPTJForCausalLM": Compared("gptj", "dropout off, eager attention"),
    "PhiForCausalLM": Compared("phi", "dropout off"),
    "StableLmForCausalLM": Compared("stablelm"),
    "GlmForCausalLM": Compared("glm"),
    "Glm4ForCausalLM": Compared("glm4"),
    "Gemma4ForCausalLM": Compared("gemma4_text", "text alone; soft cap of logits, window, per-layer inputs"),
    "Olmo3ForCausalLM": Compared("olmo3", "window in every other layer"),
    "Exaone4ForCausalLM": Compared("exaone4", "window in every other layer"),
    "MinistralForCausalLM": Compared("ministral", "window in every other layer"),
    "SmolLM3ForCausalLM": Compared("smollm3", "layers without positions"),
    "SeedOssForCausalLM": Compared("seed_oss"),
    "Ernie4_5ForCausalLM": Compared("ernie4_5"),
    "NanoChatForCausalLM": Compared("nanochat", "soft cap of logits"),
}
"""Class in config.json -> what was compared. Architectures in neither table are accepted with a warning: only the
self-check before the first step compares them."""

_PHIMOE = (
    "transformers takes no notice of the long factors of its rotary embedding, and vLLM knows it under another class "
    "name than the one transformers saves"
)

_APART = "with random weights its log-probs in vLLM and in transformers are up to {} apart"

REFUSED: dict[str, str] = {
    "PhiMoEForCausalLM": _PHIMOE,
    "PhimoeForCausalLM": _PHIMOE,
    "Gemma3nForCausalLM": _APART.format(0.5),
    "Gemma3nForConditionalGeneration": _APART.format(0.5),
    "ApertusForCausalLM": _APART.format(1.6),
}
"""Class in config.json -> why it cannot be trained here."""


CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes that predict the next token."""

ENCODERS = frozenset(
    {"albert", "bert", "big_bird", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert"}
    | {"longformer", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl"}
)
"""model_type of models whose tokens see those that follow, unless the class in config.json ends as in CAUSAL."""


BUILT_IN = ("sdpa", "eager", "flex_attention")
MODULES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
"""Attention implementation -> the module that has it. Source: transformers 5.19, `modeling_flash_attention_utils`."""
KERNELS = "kernels"
"""Package that loads compiled kernels from a cache, for names with a slash and in place of a missing module."""


def problem(name: str) -> str:
    """Return what is wrong with the value of `ds.attn_implementation`; empty for a known name or a kernel."""
    if name in BUILT_IN or name in MODULES or "/" in name:
        return ""
    valid = [*BUILT_IN, *MODULES]
    told = f"ds.attn_implementation = {name!r} is not known{meant(name, valid)}"
    return f"{told} (valid: {', '.join(valid)}, or a kernel as OWNER/NAME)"


def missing(name: str, installed: dict[str, bool]) -> str:
    """Return what `name` needs and `installed` (module -> is it there) lacks, with the remedy; empty: nothing."""
    if name in BUILT_IN or installed.get(KERNELS):
        return ""
    if "/" in name:
        return (
            f"ds.attn_implementation = {name} needs the package kernels: pip install kernels, and fetch the kernel "
            "once where there is a network (ranks are offline), or use sdpa"
        )
    if installed.get(MODULES[name]):
        return ""
    return (
        f"ds.attn_implementation = {name} needs the module {MODULES[name]} (pip install flash-attn), or the package "
        "kernels with that kernel in its cache; sdpa needs neither and runs causal flash kernels"
    )


def wanted_modules() -> tuple[str, ...]:
    """List the modules that a node has to look for."""
    return (KERNELS, *MODULES.values())

"""Make tiny random models of many architectures, unlike the plain ones: caps, factors, windows shorter than the text.

All of their dropout and noise is on in config.json: whoever loads them has to switch it off.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_rlhf.data.tokenizer import Tokenizer

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.digits + "+-*= " + string.ascii_letters
MAX_POSITIONS = 512
WINDOW = 16
ALTERNATE = ["sliding_attention", "full_attention"]
ORIGINAL = 32  # positions that the model with longrope was trained on
PHI3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [4.0 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": ORIGINAL,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": WINDOW, "final_logit_softcapping": 3.0}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**GEMMA, "layer_types": ALTERNATE},
    "phi3": {"rope_parameters": PHI3_ROPE, "original_max_position_embeddings": ORIGINAL},
    "olmo2": {},
    "granite": {
        "logits_scaling": 0.3,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
    },
    "cohere2": {
        "sliding_window": MAX_POSITIONS,
        "logit_scale": 0.2,
        "layer_types": ALTERNATE,
    },
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 1, "alibi": False},
    "bloom": {"n_head": 2, "n_layer": 2},
    "starcoder2": {"sliding_window": WINDOW},
    "gpt_bigcode": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": MAX_POSITIONS, "n_inner": 128},
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": MAX_POSITIONS, "n_inner": 128},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.01},
    "cohere": {"logit_scale": 0.2},
    "olmo": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "granitemoe": {"logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "stablelm": {},
    "gptj": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": MAX_POSITIONS, "rotary_dim": 16},
    "nanochat": {"final_logit_softcapping": 3.0},
    "glm4": {},
    "glm": {},
    "gemma4_text": {
        **{"sliding_window": WINDOW, "layer_types": ALTERNATE, "final_logit_softcapping": 3.0},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 69, "per_layer_config": {}},
    },
    "olmo3": {"sliding_window": WINDOW, "layer_types": ALTERNATE},
    "exaone4": {"sliding_window": WINDOW, "layer_types": ALTERNATE},
    "ministral": {"sliding_window": WINDOW, "layer_types": ALTERNATE},
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": {},
    "ernie4_5": {},
}
"""model_type -> what its config says beyond the sizes that all share."""

REFUSED = {"phimoe"}
"""Those whose log-probs are right in training, and which are refused because of the engines."""

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    # The default, 0.02, leaves models of this size with a nearly uniform distribution.
    "initializer_range": 0.1,
}
UNKNOWN = {"falcon": ["head_dim"], "gpt_neox": ["head_dim", "num_key_value_heads"]}
"""model_type -> shared sizes that it does not have, where vLLM would take them at their word."""


def tiny_tokenizer() -> Any:
    """Make a `PreTrainedTokenizerFast` with one token per character; other characters are dropped in encoding.

    `<pad>` is 0, `<eos>` is 1, nothing is added around the text. Spelled as byte-level BPE without merges and with
    an unknown token that is in the vocabulary: transformers ignores the saved class of a Qwen2 directory, rebuilds
    the tokenizer as a byte-level `Qwen2Tokenizer` and would otherwise lose the space and add a token of its own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS.replace(" ", "Ġ")])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def saved_tokenizer(directory: Path, template: str | None = None) -> Tokenizer:
    """Write the tiny tokenizer, and read it as a run does."""
    made = tiny_tokenizer()
    made.chat_template = template
    made.save_pretrained(directory)
    return Tokenizer.load(directory)


def make_model(path: Path, arch: str, noisy: bool = True, **changes: Any) -> Path:
    """Write a model of `arch` with what ARCHITECTURES says of it and `changes`; `noisy`: with dropout."""
    sizes = {**SIZES, **ARCHITECTURES.get(arch, {}), **changes}
    config = write_model(
        path,
        arch,
        {name: size for name, size in sizes.items() if name not in UNKNOWN.get(arch, ())},
        change=_unlike_new,
    )
    if noisy:
        _make_noisy(path / "config.json", config)
    return path


def _unlike_new(model: Any) -> None:
    """Change what is the same in every new model, which would hide that it is left out."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():  # numbers of a model that are not trained
            buffer.mul_(1.3)


def write_model(
    path: Path, arch: str, sizes: Mapping[str, Any], seed: int = 0, change: Callable[[Any], object] = lambda model: None
) -> Any:
    """Write a model of `arch` with random weights, which `change` changes, and its tokenizer; return its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = tiny_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(arch, **{"vocab_size": len(tokenizer), **special, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        change(model)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return config


def _make_noisy(file: Path, config: Any) -> None:
    written = json.loads(file.read_text())
    for name, value in vars(config).items():
        if re.search(r"drop|jitter", name) and isinstance(value, float) and config.model_type != "phimoe":
            written[name] = 0.3
    written |= {"input_jitter_noise": 0.3, "attention_dropout": 0.3} if config.model_type == "phimoe" else {}
    file.write_text(json.dumps(written))

"""What is known of architectures without importing any: what their logits need, and what a comparison has shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadFields:
    """Fields of a Hugging Face config by which a model changes its logits z behind the head.

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
"""model_type (of the text part) -> its formula, as its forward in transformers has it."""

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
"""All such fields, of any model. One that is not in the formula of its model is refused."""

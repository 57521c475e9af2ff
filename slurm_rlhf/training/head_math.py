"""What some models do with their logits behind the head: a factor, and a soft cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slurm_rlhf.config.architectures import HEAD_FIELDS, head_fields
from slurm_rlhf.errors import ModelError


@dataclass(frozen=True, slots=True)
class HeadMath:
    """z' = factor * z, and with a cap z'' = cap * tanh(z' / cap). Source: the models' forwards in transformers."""

    factor: float = 1.0
    cap: float = 0.0  # 0: none

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's logits, from those of its head; fp32, any shape."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return self.cap * (logits / self.cap).tanh() if self.cap else logits


def head_math(config: Any, where: str) -> HeadMath:
    """Of the causal language model with the Hugging Face config `config`, whose text part counts.

    Raises ModelError, naming `where`, for a field of HEAD_FIELDS that is not known to be the formula of this model.
    """
    text = config.get_text_config()
    known = head_fields(config.model_type, text.model_type)
    factor, cap = 1.0, 0.0
    for name in HEAD_FIELDS:
        value = getattr(text, name, None)
        if value is None or value == 1.0:
            continue
        if name not in known.fields:
            raise ModelError(
                f"{where}: config.json has {name} = {value}, by which models change their logits behind the "
                f"head, and how a {config.model_type} does is not known here: log-probs could be wrong. Use a model "
                f"without {name}."
            )
        if name == known.cap:
            cap = float(value)
        else:
            factor *= 1.0 / float(value) if name == known.divisor else float(value)
    return HeadMath(factor, cap)

"""Log-probs and entropy from hidden states, with the logits of one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slurm_rlhf.config.architectures import HEAD_FIELDS, head_fields
from slurm_rlhf.errors import ModelError


@dataclass(frozen=True, slots=True)
class HeadMath:
    """Applies what some models do with the logits of their head: a factor and a soft cap.

    z' = factor * z, and with a cap z'' = cap * tanh(z' / cap). Source: the forwards of the models in transformers.
    """

    factor: float = 1.0
    cap: float = 0.0  # 0: none

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given those of its head; fp32, any shape."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return self.cap * (logits / self.cap).tanh() if self.cap else logits


PLAIN_HEAD = HeadMath()


def head_math(config: Any, where: str) -> HeadMath:
    """Read the head math of a causal language model from its Hugging Face config.

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
                f"{where}: config.json has {name} = {value}, by which models change the logits of their "
                f"head, and how a {config.model_type} does it is not known here: log-probs could be wrong. Use a model "
                f"without {name}."
            )
        if name == known.cap:
            cap = float(value)
        else:
            factor *= 1.0 / float(value) if name == known.divisor else float(value)
    return HeadMath(factor, cap)


class LogprobHead(nn.Module):
    """Calls the head of a language model once for all chunks of a batch.

    It shares the head's parameters and its formula, not its hooks. ZeRO-3 gathers a module's parameters when it is
    called, so however many chunks there are, the weight is fetched once for the forward and once for the backward
    pass, and every rank calls the same modules in the same order, on which its prefetching relies.

    With `fp32` the product is taken in fp32, of the parameters that the head has: in bf16 each logit is rounded to 8
    bits, and with it log-probs and ratios. Sources: MiniMax-M1 [2506.13585]; ScaleRL [2510.13786].
    """

    def __init__(
        self, head: nn.Module, chunk_tokens: int, head_math: HeadMath = PLAIN_HEAD, fp32: bool = False
    ) -> None:
        """Raises ModelError for `fp32` with a head that is not a linear layer."""
        super().__init__()
        if fp32 and not isinstance(head, nn.Linear):
            raise ModelError(
                f"ds.fp32_lm_head: the head of this model is a {type(head).__name__}, and the key works "
                "with a linear layer only: leave it out"
            )
        for name, parameter in head.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.logits = head.forward
        self.fp32 = fp32
        self.chunk_tokens = chunk_tokens
        self.head_math = head_math

    def forward(
        self, hidden: Tensor, targets: Tensor | None, temperature: float = 1.0, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Call `chunked_logprobs` with the head's formula; without `targets`, return the logits, fp32 [A, V]."""
        logits = self._fp32_logits() if self.fp32 else self.logits
        if targets is None:
            return self.head_math(logits(hidden).float())
        return chunked_logprobs(
            logits,
            hidden,
            targets,
            temperature,
            self.chunk_tokens,
            entropy_grad=entropy_grad,
            head_math=self.head_math,
        )

    def _fp32_logits(self) -> Callable[[Tensor], Tensor]:
        """Copy the parameters to fp32 once for all chunks, so that their gradients, too, are added up in fp32."""
        weight = self.weight.float()
        bias = self.bias.float() if hasattr(self, "bias") else None

        def logits(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                return functional.linear(hidden.float(), weight, bias)

        return logits


def chunked_logprobs(
    lm_head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    *,
    entropy_grad: bool = False,
    head_math: HeadMath = PLAIN_HEAD,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs of `targets` and entropies in nats, fp32 [A] each, of softmax(lm_head(hidden) / temperature).

    hidden [A, H]; targets int64 [A]. `lm_head` is called with at most `chunk_tokens` rows at a time. With more than
    one chunk the backward pass computes each chunk's logits again instead of keeping them. Without `entropy_grad` the
    entropy carries no gradient and is not computed again.
        log p = z_t - logsumexp(z),  H = -sum_v p_v log p_v,  z = head_math(logits) / temperature
    """
    chunks = list(zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    recompute = torch.is_grad_enabled() and len(chunks) > 1
    logprobs, entropies = [], []
    for rows, wanted in chunks:
        chunk = _Chunk(lm_head, temperature, entropy_grad, head_math)
        if recompute:
            # No dropout in a head: saving the RNG state for each chunk would buy nothing.
            found = checkpoint(chunk, rows, wanted, use_reentrant=False, preserve_rng_state=False)
        else:
            found = chunk(rows, wanted)
        logprobs.append(found[0])
        entropies.append(found[1])
    return torch.cat(logprobs), torch.cat(entropies)


@dataclass(slots=True, eq=False)
class _Chunk:
    """Computes log-probs and entropy of some rows; in the backward pass's second call only what has a gradient."""

    lm_head: Callable[[Tensor], Tensor]
    temperature: float
    entropy_grad: bool
    head_math: HeadMath
    entropy: Tensor | None = None  # without a gradient, once it is known

    def __call__(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head_math(self.lm_head(hidden).float())
        log_p = torch.log_softmax(logits / self.temperature, dim=-1)
        chosen = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if self.entropy_grad:
            return chosen, _entropy(log_p)
        if self.entropy is None:
            with torch.no_grad():
                self.entropy = _entropy(log_p)
        return chosen, self.entropy


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(dim=-1)

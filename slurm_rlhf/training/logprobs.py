"""Log-probs and entropy from hidden states, with logits over the vocabulary for one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slurm_rlhf.training.head_math import HeadMath


class LogprobHead(nn.Module):
    """A language model's head that takes all chunks of a batch in one call.

    It shares the head's parameters and its formula, not its hooks. ZeRO-3 gathers a module's parameters when it is
    called, so however many chunks there are, the weight is fetched once for the forward and once for the backward
    pass, and every rank calls the same modules in the same order: that is what its prefetching goes by.
    """

    def __init__(self, head: nn.Module, chunk_tokens: int, head_math: HeadMath | None = None) -> None:
        super().__init__()
        for name, parameter in head.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.logits = head.forward
        self.chunk_tokens = chunk_tokens
        self.head_math = head_math

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `chunked_logprobs`."""
        return chunked_logprobs(
            self.logits,
            hidden,
            targets,
            temperature,
            self.chunk_tokens,
            entropy_grad=entropy_grad,
            head_math=self.head_math,
        )


def chunked_logprobs(
    lm_head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    *,
    entropy_grad: bool = False,
    head_math: HeadMath | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies in nats, both fp32 [A], of softmax(lm_head(hidden) / temperature).

    hidden [A, H]; targets int64 [A]. `lm_head` is called with at most `chunk_tokens` rows at a time. With more than
    one chunk the backward pass computes each chunk's logits again instead of keeping them, and without `entropy_grad`
    not its entropy, which then carries no gradient.
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


class _Chunk:
    """Log-probs and entropy of some rows. Called again, for the backward pass, it leaves out what has no gradient."""

    def __init__(
        self,
        lm_head: Callable[[Tensor], Tensor],
        temperature: float,
        entropy_grad: bool,
        head_math: HeadMath | None,
    ) -> None:
        self.lm_head = lm_head
        self.temperature = temperature
        self.entropy_grad = entropy_grad
        self.head_math = head_math
        self.entropy: Tensor | None = None  # without a gradient, once it is known

    def __call__(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(hidden).float()
        if self.head_math is not None:
            logits = self.head_math(logits)
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

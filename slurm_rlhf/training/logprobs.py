"""Log-probs and entropy from hidden states, with logits over the vocabulary for one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def chunked_logprobs(
    lm_head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    *,
    entropy_grad: bool = False,
    same_chunks: bool = False,
    head_math: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies in nats, both fp32 [A], of softmax(lm_head(hidden) / temperature).

    hidden [A, H]; targets int64 [A]. `lm_head` is called as a module, at most `chunk_tokens` rows at a time, so that
    ZeRO-3's hooks gather its weight. With more than one chunk the backward pass computes each chunk's logits again
    instead of keeping them. The entropy carries a gradient only with `entropy_grad`. With `same_chunks` ranks that
    have fewer chunks add empty ones: under ZeRO-3 every call of the head is a collective. `head_math` makes the model's
    logits of the head's, fp32.
        log p = z_t - logsumexp(z),  H = -sum_v p_v log p_v,  z = logits / temperature
    """
    chunks = list(zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    if same_chunks:
        most = torch.tensor(len(chunks), device=hidden.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        chunks += [(hidden[:0], targets[:0])] * (int(most) - len(chunks))
    recompute = torch.is_grad_enabled() and len(chunks) > 1
    results = []
    for rows, wanted in chunks:
        args = (lm_head, rows, wanted, temperature, entropy_grad, head_math)
        if recompute:
            # No dropout in a head: saving the RNG state for each chunk would buy nothing.
            results.append(checkpoint(_one_chunk, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(_one_chunk(*args))
    return torch.cat([logprobs for logprobs, _ in results]), torch.cat([entropy for _, entropy in results])


def _one_chunk(
    lm_head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool,
    head_math: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    logits = lm_head(hidden).float()
    if head_math is not None:
        logits = head_math(logits)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    chosen = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return chosen, entropy

"""Count model FLOPs: the operations that the mathematics needs, without recomputation."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_rlhf.placement.model_shape import ModelShape


def forward_flops(shape: ModelShape, length: float, head_share: float = 1.0) -> float:
    """Count the FLOPs of the forward pass for one token, on average over a sequence of `length` tokens.

    Two for each parameter that the token meets in a matrix product, and four for each element of a head's width and
    each key that it attends to, itself included: (length + 1) / 2 of them on average under a causal mask. The lookup
    in the embedding counts nothing. `head_share` is the share of the tokens whose logits are computed; 0 for a model
    without a vocabulary head. Norms, rotations and softmax are left out.

    Source: Chowdhery et al., PaLM (2022), appendix B, with half of its attention term, because the mask is causal
    (as FlashAttention counts: Dao, FlashAttention-2, 2023, section 4.1).
    """
    matrices = shape.active - shape.of_kind("embedding", "head", "norm", "bias") + head_share * shape.head
    attention = shape.heads * shape.head_dim * sum(_keys(length, window) for window in shape.windows)
    return 2.0 * matrices + 4.0 * attention


def training_flops(shape: ModelShape, length: float, head_share: float = 1.0) -> float:
    """Count the FLOPs of forward and backward for one token; a backward takes as many as two forwards.

    Source: Chowdhery et al., PaLM (2022), appendix B.
    """
    return 3.0 * forward_flops(shape, length, head_share)


def batch_flops(shape: ModelShape, lengths: Iterable[int], backward: bool, head_tokens: int | None = None) -> float:
    """Count the FLOPs of whole sequences; logits are computed for `head_tokens` of their tokens, None: for all."""
    counts = list(lengths)
    tokens = sum(counts)
    share = 1.0 if head_tokens is None else head_tokens / max(tokens, 1)
    body = sum(length * forward_flops(shape, length, 0.0) for length in counts)
    total = body + 2.0 * share * tokens * shape.head
    return total * (3.0 if backward else 1.0)


def mfu(flops: float, seconds: float, gpus: int, peak_tflops: float) -> float:
    """Return the model FLOPs utilisation, 0 to 1, of GPUs with this peak; 0 where no peak is known."""
    peak = peak_tflops * 1e12 * gpus * seconds
    return flops / peak if peak > 0 else 0.0


def _keys(length: float, window: int) -> float:
    """Return the mean number of keys that a token attends to."""
    if window and length > window:
        inside = window * (window + 1) / 2
        return (inside + (length - window) * window) / length
    return (length + 1) / 2

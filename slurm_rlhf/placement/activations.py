"""Bytes that a forward pass keeps for its backward, and what both need for a moment.

A token is one position of a padded micro-batch. What is kept was read off with `torch.autograd.graph`'s
saved-tensor hooks; a test holds this file to what they count.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.placement.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Pass:
    """How a model computes."""

    tokens: int  # of a micro-batch, padding included
    length: int  # of its longest sequence
    dtype: int  # bytes of an activation: 2 (bf16) or 4 (fp32)
    checkpointing: bool = False  # keep layer inputs only, and compute the rest again
    attention: str = "sdpa"  # ds.attn_implementation
    autocast: bool = False  # fp32 weights and residual stream under bf16 matrix products

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream."""
        return 4 if self.autocast else self.dtype


def saved_by_layer(shape: ModelShape, how: Pass, moe: bool = False) -> float:
    """Bytes for each token that one layer saves for its backward.

    Two norms keep their input in fp32, what it is normalised to, and what goes into a matrix product; attention keeps
    queries, keys, values, its output and a sum for each head; the MLP keeps four times its inner width. Without a
    fused kernel (eager) attention keeps its probabilities, too, which grow with the length of the sequence.
    """
    d, h = how.dtype, shape.hidden
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normed = 4 if shape.float_norms or how.autocast else d
    # Under autocast every matrix product has a copy of its input of its own: q, k and v, gate and up.
    norms = 2 * h * (4 + normed) + h * d * (5 if how.autocast else 2) + 8
    if shape.post_norms:
        norms += 2 * h * (4 + normed) + 8
    if shape.qk_norm:
        norms += (q + k) * (4 + normed) + 4 * (shape.heads + shape.kv_heads)
    if how.attention == "eager":
        attention = 4 * q * d + shape.heads * how.length * (4 + (0 if d == 4 else d))
    else:
        attention = 2 * (q + k) * d + 4 * shape.heads
    return norms + attention + (_experts(shape, d) if moe else 4 * shape.width * d)


def _experts(shape: ModelShape, d: int) -> float:
    """As the batched experts of transformers do it; the router's own tensors are small."""
    routed = shape.experts_per_token * (4 * shape.expert_width + 2 * shape.hidden)
    return d * (routed + 4 * shape.shared_width) + 36 * shape.experts_per_token + 4 * shape.experts


def saved(shape: ModelShape, how: Pass) -> int:
    """Bytes of what the body of a model saves in its forward pass, parameters left out."""
    dense = shape.layers - shape.moe_layers
    if how.checkpointing:
        layers: float = shape.layers * shape.hidden * how.stream
    else:
        layers = dense * saved_by_layer(shape, how) + shape.moe_layers * saved_by_layer(shape, how, moe=True)
    normed = 4 if shape.float_norms or how.autocast else how.dtype
    last = shape.hidden * (4 + normed) + 4 + 8  # the last norm, and the ids of the embedding
    angles = 2 * shape.head_dim * how.length * how.stream
    return round(how.tokens * (layers + last)) + angles


def recomputed(shape: ModelShape, how: Pass) -> int:
    """Bytes of the one layer that is computed again as the backward pass comes to it; 0 without checkpointing."""
    if not how.checkpointing:
        return 0
    largest = max(saved_by_layer(shape, how, moe) for moe in (False, True)[: 1 + bool(shape.moe_layers)])
    return round(how.tokens * largest)


def autocast_weights(shape: ModelShape, how: Pass) -> int:
    """Bytes of the bf16 copies that autocast keeps of all matrices, from the forward to the end of the backward."""
    return 2 * (shape.parameters - shape.of_kind("norm", "embedding")) if how.autocast else 0


def backward_work(shape: ModelShape, how: Pass) -> int:
    """Bytes of gradients of activations at the widest place of a layer, the MLP. An estimate, not measured."""
    return how.tokens * how.dtype * (2 * _widest(shape) + 2 * shape.hidden)


def forward_work(shape: ModelShape, how: Pass) -> int:
    """Bytes at the widest place of a pass without gradients. An estimate, not measured."""
    return how.tokens * (how.dtype * (3 * _widest(shape) + shape.hidden) + 4 * shape.hidden)


def _widest(shape: ModelShape) -> int:
    dense = shape.width if shape.moe_layers < shape.layers else 0
    return max(dense, shape.experts_per_token * shape.expert_width + shape.shared_width)


def logits(shape: ModelShape, chunk: int, dtype: int, backward: bool, entropy_grad: bool = False) -> int:
    """Bytes of the logits of `chunk` tokens at their worst moment, as `training/logprobs.py` computes them.

    Without gradients: logits as the head gives them, or three fp32 tensors of log-probabilities and entropy. In the
    backward: log-probabilities, their gradient and that of the logits, and those in the head's precision.
    """
    elements = chunk * shape.vocab
    if not backward:
        return 12 * elements
    return elements * (12 + (dtype if dtype < 4 else 0) + (8 if entropy_grad else 0))

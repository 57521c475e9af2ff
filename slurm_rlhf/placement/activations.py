"""Estimate the bytes that passes of a model save and work with, for each token of a padded micro-batch.

What a forward pass saves was read off with the saved-tensor hooks of `torch.autograd.graph`, and a test compares this
file with what they count.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.placement.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Pass:
    """Describe how a model computes."""

    tokens: int  # tokens of a micro-batch, padding included
    length: int  # tokens of its longest sequence
    dtype: int  # bytes of an activation: 2 (bf16, fp16) or 4 (fp32)
    checkpointing: str = "off"  # full: keep layer inputs only; selective: and results of matrix products
    attention: str = "sdpa"  # ds.attn_implementation
    autocast: bool = False  # fp32 weights and residual stream under 16-bit matrix products

    @property
    def stream(self) -> int:
        """Return the bytes of an element of the residual stream."""
        return 4 if self.autocast else self.dtype


def saved_by_layer(shape: ModelShape, how: Pass, moe: bool = False) -> float:
    """Count the bytes for each token that one layer saves for its backward.

    Two norms keep their input in fp32, the normalised values, and the input of a matrix product; attention keeps
    queries, keys, values, its output and a sum for each head; the MLP keeps four times its inner width. Without a
    fused kernel (eager) attention keeps its probabilities, too, which grow with the length of the sequence.
    """
    d, h = how.dtype, shape.hidden
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normed = 4 if shape.family.float_norms or how.autocast else d
    # Under autocast every matrix product has a copy of its input of its own: q, k and v, gate and up.
    norms = 2 * h * (4 + normed) + h * d * (5 if how.autocast else 2) + 8
    if shape.family.norms == 4:
        norms += 2 * h * (4 + normed) + 8
    if shape.family.qk_norm:
        norms += (q + k) * (4 + normed) + 4 * (shape.heads + shape.kv_heads)
    if how.attention == "eager":
        attention = 4 * q * d + shape.heads * how.length * (4 + (0 if d == 4 else d))
    else:
        attention = 2 * (q + k) * d + 4 * shape.heads
    return norms + attention + (_experts(shape, d) if moe else 4 * shape.width * d)


def _experts(shape: ModelShape, d: int) -> float:
    """Count the bytes that the experts of a layer save, as transformers computes them, and the few of the router."""
    routed = shape.experts_per_token * (4 * shape.expert_width + 2 * shape.hidden)
    return d * (routed + 4 * shape.shared_width) + 36 * shape.experts_per_token + 4 * shape.experts


def saved(shape: ModelShape, how: Pass) -> int:
    """Count the bytes that the body of a model saves in its forward pass, without parameters."""
    dense = shape.layers - shape.moe_layers
    if how.checkpointing != "off":
        layers: float = shape.layers * shape.hidden * how.stream
        layers += kept_products(shape, how.dtype) if how.checkpointing == "selective" else 0
    else:
        layers = dense * saved_by_layer(shape, how) + shape.moe_layers * saved_by_layer(shape, how, moe=True)
    normed = 4 if shape.family.float_norms or how.autocast else how.dtype
    last = shape.hidden * (4 + normed) + 4 + 8  # the last norm, and the ids of the embedding
    angles = 2 * shape.head_dim * how.length * how.stream
    return round(how.tokens * (layers + last)) + angles


def kept_products(shape: ModelShape, d: int) -> int:
    """Count the bytes for each token of the results of matrix products and attention in all layers."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = d * (2 * queries + 2 * keys + shape.hidden) + 4 * shape.heads  # with a sum for each head
    dense = d * (2 * shape.width + shape.hidden)
    routed = d * shape.experts_per_token * (2 * shape.expert_width + shape.hidden)
    return shape.layers * attention + (shape.layers - shape.moe_layers) * dense + shape.moe_layers * routed


def recomputed(shape: ModelShape, how: Pass) -> int:
    """Count the bytes of the one layer that the backward pass computes again; 0 without checkpointing."""
    if how.checkpointing == "off":
        return 0
    largest = max(saved_by_layer(shape, how, moe) for moe in (False, True)[: 1 + bool(shape.moe_layers)])
    return round(how.tokens * largest)


def autocast_weights(shape: ModelShape, how: Pass) -> int:
    """Count the bytes of the 16-bit copies of all matrices that autocast keeps until the end of the backward."""
    return 2 * (shape.parameters - shape.of_kind("norm", "embedding")) if how.autocast else 0


def forward_work(shape: ModelShape, tokens: int, width: int) -> int:
    """Estimate the widest place of a pass without gradients; not measured."""
    return tokens * (width * (3 * widest(shape) + shape.hidden) + 4 * shape.hidden)


def widest(shape: ModelShape) -> int:
    """Return the inner width of the widest MLP that a token visits."""
    dense = shape.width if shape.moe_layers < shape.layers else 0
    return max(dense, shape.experts_per_token * shape.expert_width + shape.shared_width)

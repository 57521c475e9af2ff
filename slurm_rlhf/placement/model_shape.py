"""Read the shape of a language model from its config.json alone, and count what its passes take: FLOPs and bytes.

The bytes are for each token of a padded micro-batch. What a forward pass saves was read off with the saved-tensor hooks
of `torch.autograd.graph`, and a test compares this file with what they count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.config.model_directory import check_not_quantised, read_config
from slurm_rlhf.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """Describe what config.json leaves unsaid about an architecture: its biases, norms and the names of its fields.

    In place of a flag there may be a pair: the field of config.json that decides, and its default.
    """

    qkv_bias: bool | Sequence[Any] = False
    output_bias: bool | Sequence[Any] = False
    mlp_bias: bool | Sequence[Any] = False
    qk_norm: str = ""  # "head": over each head's width, "full": over all heads together
    norms: int = 2  # norms of a layer over the hidden state
    float_norms: bool = False  # norms multiply by their weight before they go back to bf16
    tied: bool = False  # used if config.json says nothing
    head_dim: int = 0  # used if config.json says nothing; 0: hidden_size / num_attention_heads
    windows: bool = False  # `sliding_window` counts unless `use_sliding_window` says no
    experts: Sequence[str] = ("", "", "")  # fields: their number, how many a token visits, their inner width


_ROWS = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))

FAMILIES: dict[str, Family] = {name: Family(**row) for name, row in _ROWS.items()}
"""`model_type` -> its family, a row of `families.json`. Source: transformers 5.19, `models/*/modeling_*.py`."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Describe `count` parameters of `elements` each; `active` is the share of them that one token uses."""

    kind: str  # embedding, head, attention, mlp, experts, router, norm or bias
    elements: int
    count: int
    active: float = 0.0  # 0: all

    @property
    def total(self) -> int:
        return self.elements * self.count


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describe what the memory and time of a model depend on. Widths are in elements of a hidden state."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # inner width of a dense MLP
    vocab: int
    tied: bool  # the head is the embedding
    windows: tuple[int, ...]  # tokens that attention looks back, for each layer; 0: all
    experts: int  # 0: dense
    experts_per_token: int
    expert_width: int
    shared_width: int  # inner width of an expert that all tokens visit; 0: there is none
    moe_layers: int
    tensors: tuple[Tensors, ...]

    @property
    def parameters(self) -> int:
        """Count all parameters; a tied head counts once."""
        return sum(tensor.total for tensor in self.tensors)

    @property
    def active(self) -> int:
        """Count the parameters that one token uses: of the experts only those that it is sent to."""
        return round(sum(tensor.total * (tensor.active or 1.0) for tensor in self.tensors))

    @property
    def head(self) -> int:
        """Count the elements of the matrix that turns a hidden state into logits."""
        return self.hidden * self.vocab

    @property
    def body(self) -> int:
        """Count the parameters without an untied head: those of a value or reward model before its own head."""
        return self.parameters - self.of_kind("head")

    def of_kind(self, *kinds: str) -> int:
        """Count the parameters of these kinds."""
        return sum(tensor.total for tensor in self.tensors if tensor.kind in kinds)


def read_shape(key: str, path: str | Path) -> ModelShape:
    """Read the shape of the model in directory `path`, which `key` of the configuration names.

    Raises ModelError where there is no config.json, where the weights are quantised, and for an architecture whose
    shape is not known here.
    """
    config = read_config(key, Path(path))
    check_not_quantised(key, path, config)
    try:
        return shape_of(config)
    except KeyError as error:
        raise ModelError(f"{key}: {path}/config.json does not say {error.args[0]}") from None


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from a parsed config.json. Raises KeyError for a missing field, ModelError as `read_shape`."""
    name = str(config.get("model_type", ""))
    family = FAMILIES.get(name)
    if family is None:
        raise ModelError(f"model_type {name!r} has no known memory model; known: {', '.join(FAMILIES)}")
    layers, hidden, heads = (
        int(config[field]) for field in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    tied = config.get("tie_word_embeddings")
    experts, per_token, width = (_number(config, field) for field in family.experts)
    # Source of the layers with experts: transformers, `Qwen2MoeDecoderLayer`.
    plain, step = config.get("mlp_only_layers") or [], _number(config, "decoder_sparse_step") or 1
    shape = ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads") or heads,
        head_dim=_number(config, "head_dim") or family.head_dim or hidden // heads,
        width=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=family.tied if tied is None else bool(tied),
        windows=_windows(config, family, layers),
        experts=experts,
        experts_per_token=per_token,
        expert_width=width,
        shared_width=_number(config, "shared_expert_intermediate_size") if experts else 0,
        moe_layers=sum(layer not in plain and (layer + 1) % step == 0 for layer in range(layers)) if experts else 0,
        tensors=(),
    )
    return _with_tensors(shape, config)


def _with_tensors(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    family, hidden, layers, moe = shape.family, shape.hidden, shape.layers, shape.moe_layers
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    dense, norm = layers - moe, layers if family.qk_norm else 0
    biases = (family.qkv_bias, family.output_bias, family.mlp_bias)
    qkv, output, mlp = (bias if isinstance(bias, bool) else bool(config.get(*bias)) for bias in biases)
    full = family.qk_norm == "full"
    one = hidden * shape.expert_width
    share = shape.experts_per_token / max(shape.experts, 1)
    shared = moe if shape.shared_width else 0
    rows = (
        Tensors("embedding", hidden * shape.vocab, 1),
        Tensors("head", hidden * shape.vocab, 0 if shape.tied else 1),
        Tensors("attention", hidden * queries, 2 * layers),
        Tensors("attention", hidden * keys, 2 * layers),
        Tensors("mlp", hidden * shape.width, 3 * dense),
        # transformers holds all experts of a layer as two tensors.
        Tensors("experts", shape.experts * 2 * one, moe, share),
        Tensors("experts", shape.experts * one, moe, share),
        Tensors("router", shape.experts * hidden, moe),
        Tensors("mlp", hidden * shape.shared_width, 3 * shared),
        Tensors("router", hidden, shared),
        Tensors("norm", hidden, family.norms * layers + 1),
        Tensors("norm", queries if full else shape.head_dim, norm),
        Tensors("norm", keys if full else shape.head_dim, norm),
        Tensors("bias", queries, layers if qkv else 0),
        Tensors("bias", keys, 2 * layers if qkv else 0),
        Tensors("bias", hidden, layers if output else 0),
        Tensors("bias", shape.width, 2 * dense if mlp else 0),
        Tensors("bias", hidden, dense if mlp else 0),
    )
    return replace(shape, tensors=tuple(row for row in rows if row.count))


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """Return the window of each layer. Source: transformers, `sliding_window` and `layer_types`."""
    window = _number(config, "sliding_window") if config.get("use_sliding_window", family.windows) else 0
    kinds, first = config.get("layer_types"), _number(config, "max_window_layers")
    pattern = _number(config, "sliding_window_pattern")
    if isinstance(kinds, list) and len(kinds) == layers:
        slides = [kind == "sliding_attention" for kind in kinds]
    elif pattern and "max_window_layers" not in config:
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        slides = [layer >= first for layer in range(layers)]
    return tuple(window if slide else 0 for slide in slides)


def _number(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    return int(value) if isinstance(value, int | float) else 0


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


def batch_flops(shape: ModelShape, lengths: Iterable[int], backward: bool, head_tokens: int | None = None) -> float:
    """Count the FLOPs of whole sequences; logits are computed for `head_tokens` of their tokens, None: for all.

    A backward takes as many as two forwards. Source: Chowdhery et al., PaLM (2022), appendix B.
    """
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
    if not moe:
        return norms + attention + 4 * shape.width * d
    # As transformers computes the experts of a layer, and a few bytes of the router.
    routed = shape.experts_per_token * (4 * shape.expert_width + 2 * h)
    return norms + attention + d * (routed + 4 * shape.shared_width) + 36 * shape.experts_per_token + 4 * shape.experts


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

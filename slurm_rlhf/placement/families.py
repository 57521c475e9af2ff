"""What config.json leaves unsaid about an architecture: its biases, norms and the names of its fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of transformers. In place of a flag: the field of config.json that decides, and its default."""

    qkv_bias: bool | tuple[str, bool] = False
    output_bias: bool | tuple[str, bool] = False
    mlp_bias: bool | tuple[str, bool] = False
    qk_norm: str = ""  # "head": over each head's width, "full": over all heads together
    norms: int = 2  # of a layer, over the hidden state
    float_norms: bool = False  # norms multiply by their weight before they go back to bf16
    tied: bool = False  # where config.json says nothing
    head_dim: int = 0  # where config.json says nothing; 0: hidden_size / num_attention_heads
    windows: bool = False  # `sliding_window` counts unless `use_sliding_window` says no
    experts: tuple[str, str, str] = ("", "", "")  # fields: their number, how many a token visits, their inner width


_ATTENTION = ("attention_bias", False)
_QWEN_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")

FAMILIES: dict[str, Family] = {
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias=_ATTENTION, output_bias=_ATTENTION, qk_norm="head", head_dim=128),
    "llama": Family(qkv_bias=_ATTENTION, output_bias=_ATTENTION, mlp_bias=("mlp_bias", False)),
    "mistral": Family(windows=True),
    "gemma": Family(qkv_bias=_ATTENTION, output_bias=_ATTENTION, float_norms=True, tied=True, head_dim=256),
    "gemma3_text": Family(
        qkv_bias=_ATTENTION,
        output_bias=_ATTENTION,
        qk_norm="head",
        norms=4,
        float_norms=True,
        tied=True,
        head_dim=256,
        windows=True,
    ),
    "phi3": Family(windows=True),
    "olmo2": Family(qkv_bias=_ATTENTION, output_bias=_ATTENTION, qk_norm="full"),
    "granite": Family(qkv_bias=_ATTENTION, output_bias=_ATTENTION, mlp_bias=("mlp_bias", False)),
    "olmoe": Family(
        qkv_bias=_ATTENTION,
        output_bias=_ATTENTION,
        qk_norm="full",
        experts=("num_experts", "num_experts_per_tok", "intermediate_size"),
    ),
    "mixtral": Family(windows=True, experts=("num_local_experts", "num_experts_per_tok", "intermediate_size")),
    "qwen2_moe": Family(qkv_bias=("qkv_bias", True), experts=_QWEN_MOE),
    "qwen3_moe": Family(qkv_bias=_ATTENTION, output_bias=_ATTENTION, qk_norm="head", experts=_QWEN_MOE),
}
"""`model_type` -> what its classes do. Source: transformers 5.19, `models/*/modeling_*.py`."""

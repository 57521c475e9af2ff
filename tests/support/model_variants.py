"""Small configurations of every family that the memory model knows."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "mistral": {"sliding_window": 8},
    "gemma": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 80},
    "qwen3_moe": {**MOE, "head_dim": 32, "mlp_only_layers": [1]},
}


def make_config(variant: str, **sizes: Any) -> Any:
    return AutoConfig.for_model(variant.split(maxsplit=1)[0], **(SIZES | VARIANTS[variant] | sizes))

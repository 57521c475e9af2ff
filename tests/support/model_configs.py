"""Configurations of models without weights: large ones as published, and small ones of every family that is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A whole safetensors file that holds no tensor."""


def tensors(shapes: dict[str, list[int]]) -> bytes:
    """A safetensors file of zeros, one byte a number."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape)
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


_QWEN = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 32768}
SHAPES = {
    "7B": _QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4},
    "32B": _QWEN
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    | {"num_attention_heads": 40, "num_key_value_heads": 8},
}


SMALL = {
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
"""Architectures that the memory model knows."""


def make_shape(directory: Path, size: str, **changes: object) -> Path:
    """A directory with nothing but the config.json of a model of `size`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[size] | changes))
    return directory


def make_config(variant: str, **sizes: Any) -> Any:
    """A small configuration of a variant, as transformers makes it."""
    from transformers import AutoConfig

    return AutoConfig.for_model(variant.split(maxsplit=1)[0], **(SMALL | VARIANTS[variant] | sizes))

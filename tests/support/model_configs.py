"""config.json files of large models: their shapes as published, without weights."""

from __future__ import annotations

import json
from pathlib import Path

NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A whole safetensors file that holds no tensor."""

_QWEN = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 32768}
SHAPES = {
    "7B": _QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4},
    "32B": _QWEN
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    | {"num_attention_heads": 40, "num_key_value_heads": 8},
}


def make_shape(directory: Path, size: str, **changes: object) -> Path:
    """A directory with nothing but the config.json of a model of `size`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[size] | changes))
    return directory

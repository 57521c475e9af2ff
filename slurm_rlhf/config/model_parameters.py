"""Names and shapes of a model's parameters, read from the headers of its files: no torch, no weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from slurm_rlhf.errors import ModelError

_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def stored_parameters(path: str) -> list[tuple[str, list[int]]]:
    """[(name, shape), ...] of the safetensors files in directory `path`, in the order of their layers.

    Raises ModelError when there are none, or one cannot be read.
    """
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    found: list[tuple[str, list[int]]] = []
    for name in files:
        found += _header(directory / name)
    return sorted(found, key=lambda item: _layer_order(item[0]))


def _header(file: Path) -> list[tuple[str, list[int]]]:
    """Source of the format: huggingface/safetensors, README, "Format"."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        return [(name, list(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise ModelError(f"{file.parent} holds no {file.name}: only safetensors can be planned with") from None
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelError(f"{file} is not a safetensors file: {error}") from None


def _layer_order(name: str) -> tuple[object, ...]:
    """Embedding first, layers by number, the rest behind them, as models name their parameters."""
    words = name.split(".")
    number = next((int(word) for word in words if word.isdecimal()), None)
    place = 1 if number is not None else 0 if "embed" in name else 2
    return (place, number or 0, name)

"""Tell whether two model directories hold the same model, by pieces of their files."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PIECES = 256
"""Number of pieces of a file of weights that are compared, at even distances: training changes all of them, and to read
a whole large model takes minutes."""
_PIECE = 1 << 14
"""Bytes of a piece."""


def model_contents(model: Path) -> str:
    """Return a hash of config.json and, of each file of weights, its name, its size and `_PIECES` pieces."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted([model / "config.json", *model.glob("*.safetensors"), *model.glob("pytorch_model*.bin")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(size // _PIECES, _PIECE)):
                file.seek(place)
                found.update(file.read(_PIECE))
    return found.hexdigest()

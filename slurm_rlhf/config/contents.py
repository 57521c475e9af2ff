"""Compare what models and data sets hold: files by their hashes, tokenizers token by token."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from slurm_rlhf.config.model_directory import require_tokenizer
from slurm_rlhf.config.user_data import data_files
from slurm_rlhf.errors import ModelError

_PIECES = 256
"""Pieces of each file of weights that are hashed, at even distances: training changes every piece, and to hash all of a
large model takes minutes."""
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


def data_contents(path: Path | str) -> str:
    """Return the hashes of the files of a data set, of every byte. Raises DataError, OSError."""
    known = ((file, file.stat()) for file in data_files(path))
    return " ".join(_file_contents(file, stat.st_size, stat.st_mtime_ns) for file, stat in known)


@cache
def _file_contents(file: Path, size: int, changed_ns: int) -> str:
    """Return the hash of a file, cached until its size or time changes, because `status --watch` asks repeatedly."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def check_same_tokenizer(key: str, path: str, actor: str, remedy: str) -> None:
    """Check that the model of `key` in `path` has the tokenizer of `actor`. Raises ModelError with the `remedy`."""
    difference = _difference(require_tokenizer(Path(path)), require_tokenizer(Path(actor)))
    if difference:
        raise ModelError(
            f"{key}: {path} has another tokenizer than actor.model_name_or_path ({difference}), and responses are "
            f"scored as the tokens that were sampled: {remedy}"
        )


def _difference(file: Path, other: Path) -> str:
    """Return the first token that two files tokenizer.json number differently; empty if there is none."""
    if file.read_bytes() == other.read_bytes():
        return ""
    theirs, ours = _tokens(file), _tokens(other)
    for token in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token) != ours.get(token):
            return f"token {token!r} is {theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here"
    return ""


def _tokens(file: Path) -> dict[str, int]:
    """Return the id of each token, including added tokens."""
    try:
        body: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        vocab = body["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [token, score], the id is the place
            vocab = {entry[0]: index for index, entry in enumerate(vocab)}
        return {**vocab, **{added["content"]: added["id"] for added in body.get("added_tokens", [])}}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{file}: not a tokenizer that can be read: {error}") from None

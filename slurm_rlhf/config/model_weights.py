"""Read the headers of a model's weight files: names and shapes, and whether the files are whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import ModelError, shortened

_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_POINTER = b"version https://git-lfs"
"""Beginning of the text file that Git leaves in place of a large file that was not fetched."""
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_weights(key: str, directory: Path) -> None:
    """Check that the weight files of `directory` are there and whole, by their headers and sizes. Raises ModelError.

    Reads a few kB of each, so that a broken download is told before anything starts.
    """
    try:
        for file in _files(directory):
            _check_file(file)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from None


def _files(directory: Path) -> list[Path]:
    """List the files that the index names, or the single file, as transformers chooses them."""
    for index in (directory / name for name in INDICES):
        if (directory / index.name.removesuffix(".index.json")).is_file():
            return [directory / index.name.removesuffix(".index.json")]
        if index.is_file():
            files = [directory / name for name in _named(index)]
            absent = [file.name for file in files if not file.is_file()]
            if absent:
                raise ModelError(
                    f"{index} names {len(absent)} of {len(files)} files that are not there ({shortened(absent, 3)}): "
                    "the download or copy is incomplete, repeat it"
                )
            return files
    return []


def _named(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}: repeat the download") from None


def _check_file(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            begins = opened.read(len(_POINTER))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    if begins == _POINTER:
        raise ModelError(f"{file} is a pointer of Git LFS and no weights: `git lfs pull` fetches them")
    if file.suffix != ".safetensors":
        return
    entries, length = _header(file)
    whole = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    size = file.stat().st_size
    if size != whole:
        raise ModelError(
            f"{file} has {size} bytes, and by its header {whole}: the download or copy is incomplete, repeat it"
        )


def stored_parameters(path: str) -> list[tuple[str, list[int]]]:
    """List name and shape of the tensors in the safetensors files of `path`, in the order of their layers.

    Raises ModelError when there are none, or one cannot be read.
    """
    directory = Path(path)
    index = directory / INDICES[0]
    found: list[tuple[str, list[int]]] = []
    for name in _named(index) if index.is_file() else ["model.safetensors"]:
        entries, _ = _header(directory / name)
        found += [(name, list(entry["shape"])) for name, entry in entries.items()]
    if not found:
        raise ModelError(f"{path} holds no tensor")
    return sorted(found, key=lambda item: _layer_order(item[0]))


def _header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return name -> shape and place of each tensor, and the header's length in bytes.

    Source of the format: huggingface/safetensors, README, "Format".
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for entry in entries.values():
            entry["shape"], int(entry["data_offsets"][1])
        return entries, length
    except FileNotFoundError:
        raise ModelError(f"{file.parent} holds no {file.name}: only safetensors can be planned with") from None
    except struct.error:
        raise ModelError(f"{file} is not a safetensors file: it is empty, or ends within its header") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is not a safetensors file: {error}") from None


def _layer_order(name: str) -> tuple[object, ...]:
    """Sort parameters: embedding first, layers by number, then the rest."""
    words = name.split(".")
    number = next((int(word) for word in words if word.isdecimal()), None)
    place = 1 if number is not None else 0 if "embed" in name else 2
    return (place, number or 0, name)

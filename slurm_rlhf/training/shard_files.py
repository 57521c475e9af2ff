"""Optimizer fragments on disk, in files that a run with any number of ranks and any ZeRO stage can read.

rank_00003.002.safetensors    "<kind>|<start>|<parameter>" -> fp32 [n], elements [start, start + n) of the parameter;
                              kinds as in `Fragment.tensors`

A rank reads its own files first, so that a resume with the same layout opens no others. What they lack it reads from
the files of other ranks: no more than the elements it owns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slurm_rlhf.errors import CheckpointError
from slurm_rlhf.training.optimizer_state import Fragment

FILE_BYTES = 1 << 30  # safetensors builds a file in memory, so a save needs this much more


def write_shard(directory: Path, rank: int, fragments: Iterable[Fragment]) -> None:
    """Write this rank's fragments. Raises OSError."""
    part: dict[str, Tensor] = {}
    number = nbytes = 0
    for fragment in fragments:
        for kind, tensor in fragment.tensors.items():
            if part and nbytes + tensor.nbytes > FILE_BYTES:
                save_file(part, _file(directory, rank, number))
                part, number, nbytes = {}, number + 1, 0
            part[f"{kind}|{fragment.start}|{fragment.name}"] = tensor.contiguous()
            nbytes += tensor.nbytes
    save_file(part, _file(directory, rank, number))


def _file(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank_{rank:05d}.{number:03d}.safetensors"


@dataclass(frozen=True, slots=True)
class _Piece:
    file: Any  # safe_open's handle
    key: str
    start: int
    stop: int


@dataclass(slots=True)
class ShardReader:
    """Reads fragments from the files of all ranks of a checkpoint, those of rank `rank` first."""

    directory: Path
    rank: int
    _pieces: dict[tuple[str, str], list[_Piece]] = field(default_factory=dict)
    _all_open: bool = False

    def __post_init__(self) -> None:
        self._open(sorted(self.directory.glob(f"rank_{self.rank:05d}.*.safetensors")))

    def fill(self, fragment: Fragment) -> None:
        """Copy what was saved into the fragment's tensors. Raises CheckpointError when elements are missing."""
        for kind, tensor in fragment.tensors.items():
            copied = self._copy(fragment, kind, tensor)
            if copied < tensor.numel() and not self._all_open:
                self._open_all()
                copied = self._copy(fragment, kind, tensor)
            if copied < tensor.numel():
                raise CheckpointError(
                    f"{self.directory}: {tensor.numel() - copied} elements of {fragment.name} ({kind}) from element "
                    f"{fragment.start} on are in none of its files. Use another checkpoint."
                )

    def _copy(self, fragment: Fragment, kind: str, tensor: Tensor) -> int:
        """Copy what the known files have, and return how many elements. Pieces of one parameter do not overlap."""
        begin, end, copied = fragment.start, fragment.start + tensor.numel(), 0
        for piece in self._pieces.get((kind, fragment.name), []):
            first, last = max(begin, piece.start), min(end, piece.stop)
            if first < last:
                saved = piece.file.get_slice(piece.key)[first - piece.start : last - piece.start]
                tensor[first - begin : last - begin].copy_(saved)
                copied += last - first
        return copied

    def _open_all(self) -> None:
        self._pieces.clear()
        self._open(sorted(self.directory.glob("rank_*.safetensors")))
        self._all_open = True

    def _open(self, files: list[Path]) -> None:
        for path in files:
            try:
                file = safe_open(path, framework="pt")
                keys = list(file.keys())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}. Use another checkpoint.") from error
            for key in keys:
                kind, start, name = key.split("|", 2)
                length = file.get_slice(key).get_shape()[0]
                self._pieces.setdefault((kind, name), []).append(_Piece(file, key, int(start), int(start) + length))

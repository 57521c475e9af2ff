"""AdamW's state and its fp32 masters: the fragments that this rank owns, their files, and asynchronous saves.

A fragment says which elements of a named parameter it has, so a checkpoint can be read by any number of ranks, any ZeRO
stage and any trainer, whichever wrote it. A file of a checkpoint has:

rank_00003.002.safetensors    "<kind>|<start>|<parameter>" -> fp32 [n], elements [start, start + n) of the parameter;
                              kinds as in `Fragment.tensors`

A rank reads its own files first, so that a resume with the same layout opens no others. What they lack it reads from
the files of other ranks: no more than the elements it owns.

Asynchronous saves of libraries write files that only the same layout can read, or whole tensors, which a rank here does
not have (`torch.distributed.checkpoint.async_save`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slurm_rlhf.algorithms.lora import is_adapter
from slurm_rlhf.errors import CheckpointError
from slurm_rlhf.polling import in_thread
from slurm_rlhf.trainer.distributed import World

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state for each element
HOST = torch.device("cpu")
FILE_BYTES = 1 << 30  # safetensors builds a file in memory, so a save needs this much more


@dataclass(frozen=True, slots=True)
class Fragment:
    """Holds elements [start, start + n) of parameter `name`, in row-major order."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # [n] each, live memory: "fp32", and MOMENTS once a step was taken; or "parameter"


def whole_fragments(part: nn.Module, optimizer: Any, world: World | None = None) -> Iterator[Fragment]:
    """Yield the trained parameters of `part`, which AdamW (`optimizer`) updates directly, without masters.

    Every rank has all of them; with `world` only this rank's share is yielded, so that all ranks write a part.
    """
    trained = ((name, p) for name, p in part.named_parameters() if p.requires_grad)
    for number, (name, parameter) in enumerate(trained):
        if world is None or number % world.size == world.rank:
            state = optimizer.state.get(parameter, {})
            if optimizer.state and not state:  # it never had a gradient
                state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            yield fragment_of(name, 0, parameter, state, 0, parameter.numel())


def fragment_of(name: str, start: int, master: Tensor, state: dict[str, Tensor], offset: int, length: int) -> Fragment:
    """Make the fragment that is `length` elements from `offset` on of a master and of AdamW's `state` of it."""
    named = {"fp32": master, **{key: state[key] for key in MOMENTS if key in state}}
    return Fragment(name, start, {key: t.detach().view(-1).narrow(0, offset, length) for key, t in named.items()})


def zero_moments(adamw: Any, masters: Iterable[Tensor], steps: int) -> None:
    """Give AdamW the zero moments of `masters` that its first step would make, and count `steps` steps as taken."""
    for master in masters:
        moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
        # Fused kernels keep `step` on the device, others on the host.
        device = master.device if adamw.param_groups[0]["fused"] else HOST
        adamw.state[master] = {**moments, "step": torch.tensor(float(steps), device=device)}


# --- in files --------------------------------------------------------------------------------------------------------


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
        self._open(f"rank_{self.rank:05d}.*.safetensors")

    def fill(self, fragment: Fragment) -> None:
        """Copy what was saved into the fragment's tensors. Raises CheckpointError when elements are missing."""
        for kind, tensor in fragment.tensors.items():
            copied = self._copy(fragment, kind, tensor)
            if copied < tensor.numel() and not self._all_open:
                self._all_open = True
                self._pieces.clear()
                self._open("rank_*.safetensors")
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

    def _open(self, pattern: str) -> None:
        for path in sorted(self.directory.glob(pattern)):
            try:
                file = safe_open(path, framework="pt")
                keys = list(file.keys())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}. Use another checkpoint.") from error
            for key in keys:
                kind, start, name = key.split("|", 2)
                length = file.get_slice(key).get_shape()[0]
                self._pieces.setdefault((kind, name), []).append(_Piece(file, key, int(start), int(start) + length))


def check_sizes(directory: Path, saved: Mapping[str, int], ours: Mapping[str, int]) -> None:
    """Raise CheckpointError unless parameters have as many elements in a checkpoint as here; both by name."""
    for name in sorted(saved.keys() | ours.keys()):
        if saved.get(name) != ours.get(name):
            raise CheckpointError(
                f"{directory} is of another model: parameter {name} has {saved.get(name, 0)} elements in it and "
                f"{ours.get(name, 0)} here. Use the model it was trained from"
                f"{', with its lora.rank and lora.target_modules' if is_adapter(name) else ''}."
            )


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; a copy in host memory is pinned."""
    if tensor.device == device:
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=device.type == "cpu")
    return target.copy_(tensor)


def move_moments(state: dict[str, Tensor], device: torch.device) -> None:
    """Move AdamW's moments in `state` of a master; before the first step there are none."""
    for moment in MOMENTS:
        if moment in state:
            state[moment].data = moved(state[moment].data, device)


# --- asynchronous saves ----------------------------------------------------------------------------------------------


def done() -> Future[None]:
    """Return the Future of a save that is written."""
    written: Future[None] = Future()
    written.set_result(None)
    return written


class AsyncSave:
    """Writes one checkpoint at a time while training goes on. `begin` and `wait` are for one thread.

    It keeps host memory for a copy from save to save: pinned memory takes longer to get than to fill.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, str], Tensor] = {}
        self._written = done()

    def begin(
        self, fragments: Iterable[Fragment], device: torch.device, write: Callable[[list[Fragment]], None]
    ) -> Future[None]:
        """Copy fragments, which are on `device`, and have a thread `write` the copies; return its Future.

        Waits until the previous write is over.
        """
        self.wait()
        copies = []
        for fragment in fragments:
            tensors = {kind: self._copy(fragment, kind, tensor) for kind, tensor in fragment.tensors.items()}
            copies.append(Fragment(fragment.name, fragment.start, tensors))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._written = in_thread(lambda: write(copies), "async-save")
        return self._written

    def wait(self) -> None:
        """Wait until nothing is being written."""
        wait([self._written])

    def _copy(self, fragment: Fragment, kind: str, tensor: Tensor) -> Tensor:
        key = (fragment.name, fragment.start, kind)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def flush(files: Iterable[Path]) -> None:
    """Force files to disk. Raises OSError.

    On a shared file system the node that wrote them has to do it: a call of the conductor has no effect.
    """
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())

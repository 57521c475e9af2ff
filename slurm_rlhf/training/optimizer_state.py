"""AdamW's state and its fp32 masters: the fragments of them that this rank owns, in files, and in host memory.

DeepSpeed cuts one flat buffer per parameter group (ZeRO-1 and -2) or every parameter by itself (ZeRO-3), each with
padding at its end that depends on the number of ranks. A fragment says which elements of a named parameter they are,
so that what one layout has written another can read. A file of a checkpoint has:

rank_00003.002.safetensors    "<kind>|<start>|<parameter>" -> fp32 [n], elements [start, start + n) of the parameter;
                              kinds as in `Fragment.tensors`

A rank reads its own files first, so that a resume with the same layout opens no others. What they lack it reads from
the files of other ranks: no more than the elements it owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slurm_rlhf.errors import CheckpointError
from slurm_rlhf.training._deepspeed import (
    full_shape,
    gradient_buffers,
    master_range,
    masters,
    optimizer_states,
)
from slurm_rlhf.training.distributed import World, release_cache

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state for each element
HOST = torch.device("cpu")
FILE_BYTES = 1 << 30  # safetensors builds a file in memory, so a save needs this much more


@dataclass(frozen=True, slots=True)
class Fragment:
    """Holds elements [start, start + n) of parameter `name`, in row-major order."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # "fp32", and MOMENTS once a step was taken: fp32 [n] each, the live memory


def sizes(module: nn.Module) -> dict[str, int]:
    """Count the elements of every trained parameter; tied parameters appear once."""
    return {name: full_shape(p).numel() for name, p in module.named_parameters() if p.requires_grad}


def local_fragments(module: nn.Module, optimizer: Any, world: World) -> Iterator[Fragment]:
    """Yield this rank's fragments under DeepSpeed's `optimizer`; those of all ranks cover every parameter.

    Replicated state (ZeRO-0) is divided by whole parameters, so that every rank has a part to write.
    """
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for number, (name, parameter) in enumerate(trained):
        at = master_range(parameter, optimizer)
        if at is None:
            if number % world.size == world.rank:
                yield _whole(name, parameter, optimizer)
        elif at.length:
            master = masters(optimizer)[at.group]
            state = optimizer.optimizer.state.get(master, {})
            yield Fragment(name, at.start, _tensors(master, state, at.offset, at.length))


def make_moments(optimizer: Any, steps: int) -> None:
    """Give AdamW zero moments as after `steps` steps, which it would make in its first."""
    adamw = getattr(optimizer, "optimizer", optimizer)
    for master in masters(optimizer):
        moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
        adamw.state[master] = {**moments, "step": torch.tensor(float(steps))}


def _whole(name: str, parameter: Tensor, optimizer: Any) -> Fragment:
    state = optimizer.state.get(parameter, {})
    if optimizer.state and not state:  # it never had a gradient
        state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
    return Fragment(name, 0, _tensors(parameter, state, 0, parameter.numel()))


def _tensors(master: Tensor, state: dict[str, Tensor], offset: int, length: int) -> dict[str, Tensor]:
    named = {"fp32": master, **{key: state[key] for key in MOMENTS if key in state}}
    return {key: tensor.detach().view(-1).narrow(0, offset, length) for key, tensor in named.items()}


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


# --- in host memory --------------------------------------------------------------------------------------------------


def offload_optimizer(engine: Any, stage: int) -> None:
    """Move the fp32 masters and AdamW's moments of a DeepSpeed engine, ZeRO-2 or -3, to host memory. Blocks.

    The memory of gradients, which mean nothing between two steps, is freed. The bf16 parameters stay on the device:
    the weight sync that follows needs them.
    """
    if stage == 3:
        _move(engine.optimizer, HOST)
        for buffer in gradient_buffers(engine.optimizer):
            buffer.untyped_storage().resize_(0)
    else:
        engine.offload_states(include=optimizer_states(), pin_memory=True)
    release_cache()


def reload_optimizer(engine: Any, stage: int, device: torch.device) -> None:
    """Move what `offload_optimizer` has moved back to `device`. Blocks."""
    if stage == 3:
        _move(engine.optimizer, device)
        for buffer in gradient_buffers(engine.optimizer):
            # In place, because DeepSpeed's views of it stay; zeros, because padding is never written and is summed up.
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()
    else:
        engine.reload_states()


def _move(optimizer: Any, device: torch.device) -> None:
    """Move masters and moments. DeepSpeed moves them under ZeRO-3 for its own FusedAdam only, in the same way."""
    for master in masters(optimizer):
        master.data = _at(master.data, device)
        state = optimizer.optimizer.state.get(master, {})
        for moment in MOMENTS:
            if moment in state:
                state[moment].data = _at(state[moment].data, device)


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=device.type == "cpu")
    return target.copy_(tensor)

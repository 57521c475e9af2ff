"""One rank's part of a checkpoint, copied to host memory and written by a thread while the rank goes on to compute.

What libraries have for this writes files that only the same layout can read, or, as
`torch.distributed.checkpoint.async_save` does, whole tensors, which a rank here does not have. The thread writes the
files of `optimizer_state` and `trainer`, the same bytes as without it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from slurm_rlhf.trainer.optimizer_state import Fragment


def _nothing() -> Future[None]:
    """Return what is done already."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


@dataclass(frozen=True, slots=True)
class Pending:
    """Says how far a save is; without arguments, one that is done."""

    copied_s: float = 0.0  # seconds for which the next step had to wait
    written: Future[None] = field(default_factory=_nothing)  # raises what the write has raised


class HostCopy:
    """Keeps host memory for a copy of fragments from save to save: pinned memory takes longer to get than to fill."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, str], Tensor] = {}

    def take(self, fragments: Iterable[Fragment], device: torch.device) -> list[Fragment]:
        """Copy fragments that are on `device`; what an earlier call has returned is overwritten. Blocks."""
        copies = []
        for fragment in fragments:
            tensors = {kind: self._copy(fragment, kind, tensor) for kind, tensor in fragment.tensors.items()}
            copies.append(Fragment(fragment.name, fragment.start, tensors))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return copies

    def _copy(self, fragment: Fragment, kind: str, tensor: Tensor) -> Tensor:
        key = (fragment.name, fragment.start, kind)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the copies take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class AsyncSave:
    """Writes one checkpoint at a time behind the computation. `begin` and `wait` are for one thread."""

    def __init__(self) -> None:
        self.copies = HostCopy()
        self._thread: threading.Thread | None = None

    def begin(
        self, fragments: Iterable[Fragment], device: torch.device, write: Callable[[list[Fragment]], None]
    ) -> Pending:
        """Copy fragments and have a thread `write` the copies. Waits for the write before."""
        began = time.monotonic()
        self.wait()
        copies = self.copies.take(fragments, device)
        written: Future[None] = Future()
        self._thread = threading.Thread(target=_write, args=(write, copies, written), name="async-save", daemon=True)
        self._thread.start()
        return Pending(time.monotonic() - began, written)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _write(write: Callable[[list[Fragment]], None], copies: list[Fragment], written: Future[None]) -> None:
    try:
        write(copies)
    except BaseException as error:  # whoever waits for it gets it
        written.set_exception(error)
    else:
        written.set_result(None)


def flush(directory: Path, pattern: str) -> None:
    """Force the files of `directory` that match to disk. Raises OSError.

    On a file system of many nodes this is for the node that wrote them: the conductor's turn comes to nothing then.
    """
    for path in _files(directory, pattern):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(directory: Path, pattern: str) -> Iterator[Path]:
    return (path for path in directory.glob(pattern) if path.is_file())

"""Shared memory of a node: a bucket lies there once, for all ranks of the node to read.

Whoever has a chunk, because it owns it or took it from the network, writes it here and marks it; the readers copy what
they load and give the slot back. Colocated roles need no other way, and for gloo it is the last step.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slurm_rlhf.weights.backends import wait_for

_DIRECTORY = "/dev/shm"
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class SharedMemorySizes:
    """Say how much a `SharedMemory` holds."""

    slots: int  # buckets at a time
    slot_bytes: int
    chunks: int  # chunks of a bucket, at most
    readers: int

    @property
    def start(self) -> int:
        """Return the bytes of the marks, which come before the first slot."""
        return -(-(self.slots * self.chunks + self.readers) * 8 // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        return self.start + self.slots * self.slot_bytes


class SharedMemory:
    """Keep `slots` buckets, by number; numbers go on from update to update. All members use the same path and sizes.

    The marks are 64-bit words that are written whole: of each chunk, the number of the bucket it belongs to; of each
    reader, how many buckets it has given back.
    """

    def __init__(self, path: str, sizes: SharedMemorySizes, timeout_s: float) -> None:
        """Map what `reserve` made. Raises OSError where this process does not see it."""
        slots, slot_bytes, chunks, readers = sizes.slots, sizes.slot_bytes, sizes.chunks, sizes.readers
        self.nbytes = slots * slot_bytes
        self._count = slots
        self._timeout_s = timeout_s
        self._aborted = threading.Event()
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, sizes.nbytes)
        finally:
            os.close(descriptor)
        words = np.frombuffer(memory, dtype=np.int64, count=slots * chunks + readers)
        self._filled = words[: slots * chunks].reshape(slots, chunks)
        self._returned = words[slots * chunks :]
        data = np.frombuffer(memory, dtype=np.uint8, count=slots * slot_bytes, offset=sizes.start)
        self._slots = [torch.from_numpy(data[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(slots)]

    def slot(self, number: int) -> torch.Tensor:
        """Return where bucket `number` lies. Blocks until nobody reads there any more. Raises TransportFailure."""
        self._wait(lambda: int(self._returned.min()) > number - self._count, f"room for bucket {number}")
        return self._slots[number % self._count]

    def mark(self, number: int, chunks: Sequence[int]) -> None:
        """Say that chunks of a bucket are there."""
        _barrier()
        self._filled[number % self._count, list(chunks)] = number + 1

    def wait(self, number: int, chunks: int) -> torch.Tensor:
        """Block until the first `chunks` chunks of a bucket are there; return it. Raises TransportFailure."""
        marks = self._filled[number % self._count, :chunks]
        self._wait(lambda: bool((marks == number + 1).all()), f"bucket {number}")
        _barrier()
        return self._slots[number % self._count]

    def give_back(self, number: int, reader: int) -> None:
        """Say that `reader` needs the bucket no more."""
        self._returned[reader] = number + 1

    def abort(self) -> None:
        """Wake whoever waits, in this process."""
        self._aborted.set()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        wait_for(ready, self._aborted.is_set, self._timeout_s, f"{what} is not in shared memory", (0.0001, 0.002))


def reserve(sizes: SharedMemorySizes) -> str:
    """Make the memory, zeroed, and return its path; unlink it when all have mapped it. Raises OSError, if full too."""
    path = f"{_DIRECTORY}/slurm_rlhf.sync.{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Allocated now: a process that writes to a page for which /dev/shm has no room dies of SIGBUS.
        os.posix_fallocate(descriptor, 0, sizes.nbytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path


_lock = threading.Lock()


def _barrier() -> None:
    """Keep data and marks in order on processors that reorder writes: taking a lock is a full fence."""
    with _lock:
        pass

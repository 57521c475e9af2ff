"""Memory of the pretended GPUs that another process maps, over file descriptors of this host. See gpu_standins.py."""

from __future__ import annotations

import ast
import fcntl
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.multiprocessing import reductions

FIELDS = (
    "device",
    "handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""Fields that `_share_cuda_` returns and `_new_shared_cuda` takes, as torch itself unpacks them."""


@cache
def fields_in_torch() -> tuple[str, ...]:
    """The names in which torch.multiprocessing unpacks the handle; its functions are bindings without a signature."""
    for node in ast.walk(ast.parse(inspect.getsource(reductions))):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "storage._share_cuda_()":
            return tuple(ast.unparse(each) for each in node.targets[0].elts)  # type: ignore[attr-defined]
    raise AssertionError("torch.multiprocessing does not call storage._share_cuda_() any more")


class Ledger:
    """Lists uses by GPUs, not yet over, of memory that several processes have mapped, in a file that these share.

    A process enters each use, and strikes it out when its host knows that it is over. Until then no other process may
    do anything there that does not go together with it, however soon the GPU is done.
    """

    def __init__(self, descriptor: int, me: int) -> None:
        """`me`: number of the process."""
        self._descriptor, self._me = descriptor, me
        self._entered = 0

    def enter(self, low: int, high: int, does: str, at: tuple[int, int]) -> str:
        """Enter that this process `does` ("reads", "writes") something at these bytes; return whose use forbids it."""
        with self._uses() as uses:
            for process, start, end, other, *_ in uses:
                if process != self._me and start < high and low < end and "writes" in (does, other):
                    return f"process {process} still {other}"
            uses.append([self._me, low, high, does, *at])
            self._entered += 1
        return ""

    def strike(self, known: Mapping[int, int]) -> None:
        """The host knows that uses up to this clock are over."""
        if self._entered:
            with self._uses() as uses:
                uses[:] = [use for use in uses if use[0] != self._me or known.get(use[4], 0) < use[5]]
                self._entered = sum(use[0] == self._me for use in uses)

    def close(self) -> None:
        os.close(self._descriptor)

    @contextmanager
    def _uses(self) -> Iterator[list[Any]]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            uses = json.loads(os.pread(self._descriptor, 1 << 20, 0) or b"[]")
            yield uses
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(uses).encode(), 0)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def share(fake: Any) -> Callable[[Any], tuple[Any, ...]]:
    """torch.UntypedStorage._share_cuda_."""
    assert fields_in_torch() == FIELDS

    def _share_cuda_(storage: Any) -> tuple[Any, ...]:
        device = fake.memory.device_of(storage)
        if device.type != "cuda":
            raise RuntimeError("_share_cuda_: only available on CUDA")
        descriptor, nbytes = storage._share_fd_cpu_()
        ledger = os.memfd_create("ledger")
        fake.streams.mapped[storage._cdata] = Ledger(ledger, os.getpid())
        where = {"pid": os.getpid(), "fd": descriptor, "gpu": fake.gpus[device.index], "ledger": ledger}
        return device.index, json.dumps(where).encode(), nbytes, 0, b"counter", 0, b"event", True

    return _share_cuda_


def shared(fake: Any) -> Any:
    """torch.UntypedStorage._new_shared_cuda."""

    def _new_shared_cuda(
        device: int, handle: bytes, size: int, offset: int, ref: bytes, ref_offset: int, event: bytes, sync: bool
    ) -> Any:
        kinds = (int, bytes, int, int, bytes, int, bytes, bool)
        given = (device, handle, size, offset, ref, ref_offset, event, sync)
        if not all(type(each) is kind for each, kind in zip(given, kinds, strict=True)):
            raise TypeError(f"_new_shared_cuda: wants {kinds}, got {given}")
        where = json.loads(handle)
        if where["pid"] == os.getpid():
            raise RuntimeError("CUDA error: invalid device context: a process cannot open its own memory handle")
        index = fake.cuda._device(device).index
        fake.mapped.append((fake.gpus[index], where["gpu"]))
        if fake.gpus[index] != where["gpu"]:
            raise RuntimeError(f"the memory is on {where['gpu']}, and was opened on {fake.gpus[index]}")
        descriptor = os.open(f"/proc/{where['pid']}/fd/{where['fd']}", os.O_RDWR)
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)
        finally:
            os.close(descriptor)
        fake.memory.add(storage, index)
        ledger = os.open(f"/proc/{where['pid']}/fd/{where['ledger']}", os.O_RDWR)
        fake.streams.mapped[storage._cdata] = Ledger(ledger, os.getpid())
        return storage

    return staticmethod(_new_shared_cuda)

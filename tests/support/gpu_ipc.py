"""Memory of the pretended GPUs that another process maps, over file descriptors of this host. See gpu_standins.py."""

from __future__ import annotations

import ast
import inspect
import json
import os
from collections.abc import Callable
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
"""What `_share_cuda_` returns and `_new_shared_cuda` takes, as torch itself unpacks it."""


@cache
def fields_in_torch() -> tuple[str, ...]:
    """The names in which torch.multiprocessing unpacks the handle; its functions are bindings without a signature."""
    for node in ast.walk(ast.parse(inspect.getsource(reductions))):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "storage._share_cuda_()":
            return tuple(ast.unparse(each) for each in node.targets[0].elts)  # type: ignore[attr-defined]
    raise AssertionError("torch.multiprocessing does not call storage._share_cuda_() any more")


def share(fake: Any) -> Callable[[Any], tuple[Any, ...]]:
    """torch.UntypedStorage._share_cuda_."""
    assert fields_in_torch() == FIELDS

    def _share_cuda_(storage: Any) -> tuple[Any, ...]:
        device = fake.memory.device_of(storage)
        if device.type != "cuda":
            raise RuntimeError("_share_cuda_: only available on CUDA")
        descriptor, nbytes = storage._share_fd_cpu_()
        where = {"pid": os.getpid(), "fd": descriptor, "gpu": fake.gpus[device.index]}
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
        return storage

    return staticmethod(_new_shared_cuda)

"""The interface of a bare ProcessGroupNCCL, by the bindings and stubs of the installed torch. See gpu_nccl.py."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_signatures import Stub, bound, signatures
from torch.distributed import DistBackendError as NcclError

if TYPE_CHECKING:
    from gpu_nccl import ProcessGroupNCCL

BACKEND = torch._C._distributed_c10d.Backend
STUB = Stub(Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi", "ProcessGroupNCCL")
OPTIONS = Stub(Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi", "ProcessGroupNCCL.Options")
WORK = Stub(Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi", "Work")


def known(name: str) -> list[Any]:
    """Return the signatures under `name`. Raises AttributeError where a bare ProcessGroupNCCL has no such method."""
    if name in STUB.methods and name not in dir(BACKEND):
        return STUB.methods[name]
    if callable(getattr(BACKEND, name, None)):
        return signatures(getattr(BACKEND, name))
    raise AttributeError(f"'torch._C._distributed_c10d.ProcessGroupNCCL' object has no attribute {name!r}")


class Options:
    """ProcessGroupNCCL.Options: only fields that the stub has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound(OPTIONS.methods["__init__"], "Options", args, kwargs)
        object.__setattr__(self, "_timeout", timedelta(minutes=10))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OPTIONS.fields:
            raise AttributeError(f"'ProcessGroupNCCL.Options' object has no attribute {name!r}")
        if name == "_timeout" and not isinstance(value, timedelta):
            raise TypeError(f"_timeout: wants a timedelta, got {value!r}")
        object.__setattr__(self, name, value)


class FakeWork:
    """Stands in for the handle that an operation returns."""

    def __init__(self, group: ProcessGroupNCCL, run: Callable[[], None], clock: dict[int, int]) -> None:
        self._group, self._run, self._clock = group, run, clock
        self._done = threading.Event()  # as the host sees it
        self._left = threading.Event()  # the GPU: what failed hangs there until it is aborted
        self._error: NcclError | None = None

    def __getattribute__(self, name: str) -> Any:
        own = ("over", "finish", "finish_undone", "execute", "fail")
        if not (name.startswith("_") or name in own or name in WORK.methods):
            raise AttributeError(f"'torch._C._distributed_c10d.Work' object has no attribute {name!r}")
        return object.__getattribute__(self, name)

    def is_completed(self) -> bool:
        if self.over():
            self._group._streams.learn(self._clock)
        return self.over()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.synchronize()
        limit = timeout or (self._group._timeout if self._group._blocking else timedelta(0))
        if limit and not self._done.wait(limit.total_seconds()):
            self.fail("ran into its time-out")
        if self._error is not None:
            self._group.abort()
            raise self._error
        return True

    def synchronize(self) -> None:
        self._group._streams.current()._take(self._clock, [self])

    # The methods below are the stand-ins' own.

    def over(self) -> bool:
        return self._done.is_set()

    def finish(self) -> None:
        """The host computes what a GPU would queue behind this operation: not before it is over."""
        self._left.wait()

    def finish_undone(self) -> None:
        """Completed, as the host sees it, and nothing was done."""
        self._done.set()
        self._left.set()

    def execute(self, waits_for: Sequence[FakeWork]) -> None:
        for work in waits_for:
            work.finish()
        try:
            if not self.over():
                self._run()
                self._left.set()
        except Exception as error:
            self.fail(str(error))
        self._done.set()
        self._run = _nothing  # it held the tensors
        self._group._over(self)

    def fail(self, why: str) -> None:
        if self._error is None and not self.over():
            self._error = NcclError(
                f"NCCL error: remote process exited or there was a network error, {why}\nncclRemoteError: A call "
                "failed possibly due to a network error or a remote process exiting prematurely."
            )
        self._done.set()


def _nothing() -> None: ...


def fits(annotation: str, value: Any) -> bool:
    """Whether pybind11 would accept a value, where it is to be a tensor, a list of them or a number."""
    if annotation == "torch.Tensor":
        return isinstance(value, torch.Tensor)
    if annotation == "collections.abc.Sequence[torch.Tensor]":
        return isinstance(value, (list, tuple)) and all(isinstance(each, torch.Tensor) for each in value)
    if annotation.startswith("typing.SupportsInt"):
        return isinstance(value, int)
    return True


def on_gpu(tensors: Sequence[torch.Tensor], current: int) -> None:
    for tensor in tensors:
        if tensor.is_cuda and tensor.get_device() != current:
            raise AssertionError(f"this thread's GPU is {current}, and the tensor is on {tensor.device}")
        if not tensor.is_cuda:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")


def check_interface() -> None:
    """NCCL_SOCKET_IFNAME has to name an interface: by a prefix, with `=` the whole name, with `^` all others."""
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [name for _, name in socket.if_nameindex()]
    if not wanted:
        return
    without, whole = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    chosen = [each for each in wanted.lstrip("^=").split(",") if each]

    def named(name: str) -> bool:
        return any(name == each if whole else name.startswith(each) for each in chosen)

    if not any(named(name) != without for name in names):
        raise NcclError(f"ncclInvalidUsage: Bootstrap : no socket interface found among {names} for {wanted!r}")

"""Stand-ins with which GPU code runs where no GPU is. What they prove: every line runs, every call that is made exists
with these arguments in the installed libraries, devices are not mixed, streams are waited for. What they do not prove:
that a GPU, NCCL or a driver does what is expected of it, or how fast.

    with fake_cuda(["GPU-a"]) as cuda:          # or the fixture of that name; names shared by processes are one GPU
        weights = torch.zeros(8, device="cuda")
        assert weights.is_cuda and cuda.syncs["item"] == 0
    check_signature(vllm.LLMEngine, FakeEngine)  # your own stand-ins, in the test that uses them

A test that starts ranks calls `FakeCuda(...).install()` first thing in each child. Inside:

- `torch.cuda.*` is what `gpu_cuda.py` offers, each compared with the installed function when it is put in place; any
  other public function of torch.cuda raises NoStandIn. Write one there when your code needs it.
- Tensors made on or moved to "cuda" lie in CPU memory and say that they are on cuda: `.device`, `.is_cuda`. Mixing
  devices, `.numpy()` of cuda tensors, a device number that is not there raise what torch raises. What makes the host
  wait is counted in `cuda.syncs`; bytes by `torch.cuda.memory_allocated` and `mem_get_info`.
- Streams: what one stream writes and another touches without an event or a wait between them raises StreamRace; so does
  memory that is freed while a stream still uses it, when it is handed out again, and an event that was never recorded.
- `torch.distributed.ProcessGroupNCCL` is `gpu_nccl.py`'s, over gloo; a thread has to have the GPU of its tensors as the
  current one. Memory is shared between processes by `_share_cuda_` and `_new_shared_cuda`: what a process does there
  while the GPU of another is at work, as far as that one's host knows, raises StreamRace.

The bare modes of a library (vLLM's platform, DeepSpeed's accelerator) are not faked here: patch what your code asks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from gpu_cuda import Cuda
from gpu_ipc import share, shared
from gpu_nccl import ProcessGroupNCCL
from gpu_signatures import check_signature
from gpu_streams import Streams
from gpu_tensors import DeviceMode, Memory

__all__ = ["FakeCuda", "NoStandIn", "check_signature", "fake_cuda"]


class NoStandIn(AssertionError):
    """Code called a function of torch.cuda that has no stand-in."""


class FakeCuda:
    """The GPUs that this process sees, and what was done with them."""

    def __init__(self, gpus: Sequence[str] = ("GPU-a",), memory: int = 80 << 30) -> None:
        """`gpus`: their names; processes that name the same see the same one. `memory`: bytes of each."""
        self.gpus = tuple(gpus)
        self.syncs: Counter[str] = Counter()
        """How often the host waited for a GPU, by what made it."""
        self.streams = Streams(self.syncs)
        self.memory = Memory(len(self.gpus), memory)
        self.memory.freed = self.streams.freed
        self.mapped: list[tuple[str, str]] = []
        """Memory of other processes that was opened: on which GPU, and whose."""
        self.broken_links: list[str] = []
        """Texts with which the next coalesced operations of NCCL here fail."""
        self.cuda = Cuda(self.gpus, self.memory, self.streams, self.syncs)
        self._mode = DeviceMode(self.memory, self.cuda, self.streams, self.syncs)
        self._undo = ExitStack()

    def see(self, gpus: Sequence[str]) -> None:
        """Other GPUs than before, for a process that takes the place of several ranks in turn."""
        assert len(gpus) == len(self.gpus)
        self.gpus = self.cuda._gpus = tuple(gpus)

    def install(self) -> FakeCuda:
        """Take the place of CUDA in this process, in all of its threads, until `remove`."""
        try:
            self._install(self._undo.enter_context)
        except BaseException:
            self.remove()
            raise
        return self

    def _install(self, put: Callable[[Any], Any]) -> None:
        for name, real in list(vars(torch.cuda).items()):
            if name.startswith("_") or not callable(real) or not str(real.__module__).startswith("torch.cuda"):
                continue
            fake = getattr(self.cuda, name, None)
            if fake is None:
                fake = _absent(name)
            else:
                check_signature(real, fake, f"torch.cuda.{name}")
            put(mock.patch.object(torch.cuda, name, fake))
        unknown = [name for name in dir(self.cuda) if not name.startswith("_") and not hasattr(torch.cuda, name)]
        assert not unknown, f"torch.cuda has no {', '.join(unknown)}"
        put(mock.patch.object(torch.distributed, "is_nccl_available", return_value=True))
        put(mock.patch.object(torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL.of(self), create=True))
        for name, fake in (("_share_cuda_", share(self)), ("_new_shared_cuda", shared(self))):
            assert hasattr(torch.UntypedStorage, name), f"torch.UntypedStorage has no {name}"
            put(mock.patch.object(torch.UntypedStorage, name, fake))
        put(mock.patch.object(torch.UntypedStorage, "device", property(self.memory.device_of)))
        put(mock.patch.object(torch.Tensor, "record_stream", self.streams.record_stream))
        put(self._mode)
        put(mock.patch.object(threading.Thread, "_bootstrap_inner", self._in_threads()))

    def remove(self) -> None:
        """CUDA is absent again."""
        self._undo.close()

    def _in_threads(self) -> Callable[[threading.Thread], None]:
        mode, original = self._mode, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def bootstrap(thread: threading.Thread) -> None:
            with mode:
                original(thread)

        return bootstrap


@contextmanager
def fake_cuda(gpus: Sequence[str] = ("GPU-a",), memory: int = 80 << 30) -> Iterator[FakeCuda]:
    """See `FakeCuda`."""
    fake = FakeCuda(gpus, memory).install()
    try:
        yield fake
    finally:
        fake.remove()


def _absent(name: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NoStandIn(f"torch.cuda.{name} has no stand-in: write one in tests/support/gpu_cuda.py")

    return missing

"""A bare ProcessGroupNCCL over gloo: what its bindings accept, how it fails, and no more. See gpu_standins.py.

Every call is bound to the signatures that the installed torch has for it: those that pybind11 wrote for `Backend`, and
the stub of `ProcessGroupNCCL` (torch/_C/_distributed_c10d.pyi), which a CPU build lacks. As with NCCL,

- a communicator comes to be with the first operation, when all ranks have entered it; two ranks on one GPU are refused
  unless NCCL_HOSTID tells them apart; NCCL_SOCKET_IFNAME has to name an interface;
- what is sent lies on the current GPU of the thread: NCCL would make a context on that other one, too;
- operations run apart from the host, in order, after what the current stream waits for; between `_start_coalescing` and
  `_end_coalescing` sends and receives return None, and begin together;
- an operation that is left open by a thread holds back all that the thread asks of any group, which still counts as
  completed; so do operations that their own rank aborts (seen on an H200, torch 2.13, NCCL 2.29.7);
- `wait` makes the current stream wait, not the host, and raises for an error that is known by then;
- a watchdog takes the process down when an operation fails. TORCH_NCCL_ASYNC_ERROR_HANDLING, read by the constructor,
  does not help: at 0 and 2 (ErrorHandlingMode in ProcessGroupNCCL.hpp) the watchdog itself goes on, but its dump signal
  makes the heartbeat monitor of the process's first group end the process some minutes later. With
  TORCH_NCCL_BLOCKING_WAIT the library says "NO watchdog thread is created"; `wait` then waits on the host.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from gpu_nccl_bindings import BACKEND, STUB, FakeWork, NcclError, Options, check_interface, fits, known, on_gpu
from gpu_signatures import bound
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

EXIT_CODE = 134
"""Exit status of a process that the watchdog took down: std::terminate aborts."""

_LOOK_S = 0.02
_open = threading.local()
"""`operations`: of this thread, whose `_end_coalescing` has not come."""
_NEVER_SENT = 0x7FFFFFFF


class ProcessGroupNCCL:
    """See the module's text. `_` names that the stub lacks are the stand-ins' own."""

    Options = Options
    made: list[ProcessGroupNCCL]

    @staticmethod
    def of(fake: Any) -> type:
        """The class, for the GPUs of a process; `made` lists its groups."""
        return type("ProcessGroupNCCL", (ProcessGroupNCCL,), {"_fake": fake, "made": []})

    _fake: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound(STUB.methods["__init__"], "ProcessGroupNCCL", args, kwargs).arguments
        if not isinstance(given["store"], Store) or not isinstance(given["options"], Options):
            raise TypeError(f"ProcessGroupNCCL(): incompatible constructor arguments: {args}")
        self._store, self._rank, self._size = given["store"], given["rank"], given["size"]
        self._timeout = given["options"]._timeout
        self._streams = self._fake.streams
        self._blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
        self._stream = self._streams.Stream()
        self._gloo: Any = None
        self._aborted = False
        self._coalescing: list[Callable[[], list[Any]]] | None = None
        self._touched: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._queue: queue.SimpleQueue[tuple[FakeWork, list[Any]] | None] = queue.SimpleQueue()
        self._outstanding: list[FakeWork] = []
        self._lock = threading.Lock()
        type(self).made.append(self)
        threading.Thread(target=self._execute, daemon=True, name="fake-nccl").start()
        if not self._blocking:
            threading.Thread(target=self._watch, daemon=True, name="fake-nccl-watchdog").start()

    def __getattribute__(self, name: str) -> Any:
        """A method only where the bindings have one, and with arguments that they take."""
        if name.startswith("__") or name in ("made", "of", "Options") or (name in _OWN and name not in _CALLS):
            return object.__getattribute__(self, name)
        if name in vars(self):
            return vars(self)[name]
        accepted = known(name)
        if name not in _CALLS:
            raise AssertionError(f"ProcessGroupNCCL.{name} has no stand-in: write one in tests/support/gpu_nccl.py")

        def call(*args: Any, **kwargs: Any) -> Any:
            bound(accepted, name, args, kwargs, fits)
            return object.__getattribute__(self, f"_call_{name}")(*args, **kwargs)

        return call

    def _call_size(self) -> int:
        return self._size

    def _call__is_initialized(self) -> bool:
        return self._gloo is not None

    def _call_send(self, tensors: Any, dstRank: int, tag: int) -> Any:
        return self._point_to_point("send", tensors, dstRank)

    def _call_recv(self, tensors: Any, srcRank: int, tag: int) -> Any:
        return self._point_to_point("recv", tensors, srcRank)

    def _call_allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = tensors if isinstance(tensors, list) else [tensors]
        return self._collective(given, given, lambda gloo: gloo.allreduce(tensors, *args, **kwargs))

    def _call_broadcast(self, tensors: Any, root: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = tensors if isinstance(tensors, list) else [tensors]
        written = [] if root == self._rank else given
        return self._collective(given, written, lambda gloo: gloo.broadcast(tensors, root, *args, **kwargs))

    def _call__allgather_base(self, output: Any, input: Any, *args: Any) -> Any:
        if output.numel() != input.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        return self._collective([input], [output], lambda gloo: gloo._allgather_base(output, input.clone(), *args))

    def _call__start_coalescing(self) -> None:
        _open.operations = held_back() + 1
        self._coalescing, self._touched = [], ([], [])

    def _call__end_coalescing(self) -> Any:
        if self._coalescing is None:
            raise RuntimeError("_end_coalescing without _start_coalescing")
        _open.operations -= 1
        begun, self._coalescing = self._coalescing, None
        if not begun:
            return None

        def run() -> None:
            if self._fake.broken_links:
                raise RuntimeError(self._fake.broken_links.pop())
            works = [work for begin in begun for work in begin()]
            for work in works:
                work.wait()

        return self._launch(run, *self._touched)

    def _call_abort(self) -> None:
        self._aborted = True
        with self._lock:
            outstanding = list(self._outstanding)
        for work in outstanding:
            work.finish_undone()
        self._streams.learn(self._stream._clock)  # nothing runs any more
        if self._gloo is not None:
            nothing = torch.zeros(1, dtype=torch.uint8)
            for peer in (peer for peer in range(self._size) if peer != self._rank):
                with suppress(RuntimeError):
                    self._gloo.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        self._queue.put(None)

    _call_shutdown = _call_abort

    def _point_to_point(self, name: str, tensors: list[torch.Tensor], peer: int) -> Any:
        on_gpu(tensors, self._fake.cuda.current_device())
        if len(tensors) != 1:
            raise ValueError("Expecting one tensor only but got multiple.")
        if self._aborted:
            raise NcclError(f"NCCL communicator was aborted on rank {self._rank}.")
        if not 0 <= peer < self._size or peer == self._rank:
            raise ValueError(f"invalid rank {peer} of a group of {self._size}, at rank {self._rank}")

        def begin() -> list[Any]:
            return [getattr(self._gloo, name)(tensors, peer, 0)]

        read, written = (tensors, []) if name == "send" else ([], tensors)
        if self._coalescing is None:
            raise AssertionError("a bare send makes a communicator of its own in NCCL: coalesce it")
        self._add(begin, read, written)
        return None

    def _collective(self, read: list[Any], written: list[Any], begin: Callable[[Any], Any]) -> FakeWork:
        on_gpu([*read, *written], self._fake.cuda.current_device())
        if self._coalescing is not None:
            self._add(lambda: [begin(self._gloo)], read, written)
            return None
        return self._launch(lambda: begin(self._gloo).wait(), read, written)

    def _add(self, begin: Callable[[], list[Any]], read: list[Any], written: list[Any]) -> None:
        assert self._coalescing is not None
        self._coalescing.append(begin)
        self._touched[0].extend(read)
        self._touched[1].extend(written)

    def _launch(self, run: Callable[[], None], read: list[Any], written: list[Any]) -> FakeWork:
        if self._aborted:
            raise NcclError(f"NCCL communicator was aborted on rank {self._rank}.")
        self._connect()
        waiting = self._streams.current()
        self._stream._take(waiting._clock)
        self._streams.touched(read, written, self._stream)
        work = FakeWork(self, run, dict(self._stream._clock))
        if held_back():
            work.finish_undone()
            return work
        with self._lock:
            self._outstanding.append(work)
        self._queue.put((work, list(waiting._pending)))
        return work

    def _execute(self) -> None:
        with torch._C.DisableTorchFunction():  # the host does not compute this on a stream
            while (item := self._queue.get()) is not None:
                work, waits_for = item
                work.execute(waits_for)

    def _watch(self) -> None:
        while not self._aborted:
            with self._lock:
                failed = [work for work in self._outstanding if work.over() and work._error is not None]
            if failed:
                print(f"stand-in for NCCL, watchdog: taking the process down: {failed[0]._error}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(EXIT_CODE)
            time.sleep(_LOOK_S)

    def _over(self, work: FakeWork) -> None:
        with self._lock:
            if work._error is None:
                self._outstanding = [other for other in self._outstanding if other is not work]

    def _connect(self) -> None:
        """The first operation makes the communicator, with all ranks."""
        if self._gloo is not None:
            return
        check_interface()
        me = [os.environ.get("NCCL_HOSTID", socket.gethostname()), self._fake.gpus[self._fake.cuda.current_device()]]
        self._store.set(f"gpu/{self._rank}", "/".join(me))
        everybody = [self._store.get(f"gpu/{rank}").decode() for rank in range(self._size)]
        if len(set(everybody)) < self._size:
            twins = [rank for rank in range(self._size) if everybody.count(everybody[rank]) > 1]
            raise NcclError(f"ncclInvalidUsage: Duplicate GPU detected : ranks {twins} are on one CUDA device")
        options = ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = ProcessGroupGloo(PrefixStore("stand-in", self._store), self._rank, self._size, options)


def held_back() -> int:
    """Count the open operations of this thread, in whatever group: NCCL starts nothing before they end."""
    return getattr(_open, "operations", 0)


_OWN = frozenset(dir(ProcessGroupNCCL))
_CALLS = frozenset(name.removeprefix("_call_") for name in _OWN if name.startswith("_call_"))
assert issubclass(ProcessGroupGloo, BACKEND)
assert all(known(name) for name in _CALLS), "a stand-in has a method that the bindings lack"

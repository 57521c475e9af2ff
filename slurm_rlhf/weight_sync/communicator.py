"""One NCCL communicator, outside of every WORLD. Run through stand-ins, not on GPUs yet.

Signatures: `Backend` in torch/_C/_distributed_c10d.pyi, and what pybind11 says of it. A bare ProcessGroupNCCL is one:
unlike those of a `ProcessGroup`, its `_start_coalescing` and `_end_coalescing` take no argument.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, Work

from slurm_rlhf.polling import wait_until
from slurm_rlhf.weight_sync.backends.transport import TransportFailure

_POLL_S = 0.0005
_OWN_ERRORS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""What the constructor reads, for groups whose errors are ours to handle. Blocking wait means: no watchdog thread (says
the library itself). One would see what we see, and whatever ASYNC_ERROR_HANDLING says it then has the process's first
group, the training's, dump and end the process. Nothing here calls `wait` before an operation is over."""

Piece = tuple[torch.Tensor, int]
"""Contiguous bytes on the GPU, and the rank that they go to or come from."""


class Communicator:
    """Its operations are enqueued behind the current stream and return at once. Raises TransportFailure."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        """Does not connect yet: the first operation does, and all ranks have to enter it."""
        self.timeout_s = timeout_s
        self.aborted = False
        self._lock = threading.Lock()
        with _failing():
            self._group = bare_group(store, rank, world, timeout_s)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> list[Work]:
        """All of them as one operation, so that their order plays no part."""

        def begin() -> None:
            for tensor, rank in sends:
                self._group.send([tensor], rank, 0)
            for tensor, rank in receives:
                self._group.recv([tensor], rank, 0)

        return self._together(begin)

    def spread(self, pieces: Sequence[Piece]) -> list[Work]:
        """Each piece from its rank to all others, in place, as one operation."""

        def begin() -> None:
            for tensor, rank in pieces:
                self._group.broadcast(tensor, rank)

        return self._together(begin)

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> list[Work]:
        """`mine`, a part of `whole` by the rank, to all others."""
        with _failing():
            return [self._group._allgather_base(whole, mine)]

    def meet(self, device: torch.device) -> list[Work]:
        """Connect all ranks: what the first operation does, whatever it is."""
        with _failing():
            return [self._group.allreduce(torch.zeros(1, device=device))]

    def settle(self, works: Sequence[Work]) -> None:
        """Wait until they are over, and raise what went wrong. `Work.wait` alone would neither end nor say anything
        when the group is aborted by another thread."""

        def done() -> bool:
            over = all(work.is_completed() for work in works)
            if not over and self.aborted:
                raise TransportFailure("the NCCL group was aborted", peer_left=False)
            return over

        with _failing():
            if not wait_until(done, self.timeout_s, _POLL_S, _POLL_S):
                raise TransportFailure(f"NCCL: not done after {self.timeout_s:g} s", peer_left=False)
            for work in works:
                work.wait()

    def abort(self) -> None:
        """End what is on its way, here and at the peers. Any thread, at any time."""
        with self._lock:
            first, self.aborted = not self.aborted, True
        if first:
            # It waits for NCCL, at most the group's time-out, and then raises.
            with suppress(RuntimeError):
                self._group.abort()

    def _together(self, begin: Callable[[], None]) -> list[Work]:
        with _failing():
            self._group._start_coalescing()
            begin()
            work = self._group._end_coalescing()
        return [work] if work is not None else []


def bare_group(store: Store, rank: int, world: int, timeout_s: float) -> Any:
    """A ProcessGroupNCCL that leaves its errors to its owner. Its works' `wait` blocks."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _environment(_OWN_ERRORS):
        return ProcessGroupNCCL(store, rank, world, options)


def in_time(connect: Callable[[], None], timeout_s: float) -> None:
    """Run `connect` on the current GPU and give up on it after `timeout_s`: making a communicator cannot be aborted.

    Raises TransportFailure.
    """
    number = torch.cuda.current_device()
    failures: list[Exception] = []

    def run() -> None:
        torch.cuda.set_device(number)  # a thread begins with the first one
        try:
            connect()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="sync-nccl", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TransportFailure(f"NCCL did not connect the members within {timeout_s:g} s", peer_left=False)
    if failures:
        raise failures[0]


def name_interface(interface: str) -> None:
    """Let NCCL's sockets use the network interface, unless the user has said which. Not where it is none: a member that
    only knows its address (an alias, a container) would make NCCL look for an interface of that name."""
    if interface in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=`: not all that begin so


@contextmanager
def _failing() -> Iterator[None]:
    """Whatever is raised within is the backend's failure: the update is repeated, or goes over to sync.fallback."""
    try:
        yield
    except TransportFailure:
        raise
    except Exception as error:
        raise TransportFailure(f"NCCL: {error}", peer_left="remote" in str(error)) from error


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """These variables, for a constructor that reads them; afterwards what there was."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""NCCL: between GPUs, one rank each, outside of every WORLD. Run on one GPU so far, by several ranks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch.distributed import PrefixStore, Store, Work

from slurm_rlhf.polling import in_thread
from slurm_rlhf.process_groups._torch import all_gather, coalesced, nccl_group
from slurm_rlhf.weights.backends import Incoming, PendingTransfer, TransportFailure, wait_for
from slurm_rlhf.weights.bucket import Pool
from slurm_rlhf.weights.transfer_plan import ALIGN, BucketPart, SyncPlan

Piece = tuple[torch.Tensor, int]
"""Contiguous bytes on the GPU, and the rank that they go to or come from."""


class NcclCommunicator:
    """Send, receive and collect over one NCCL communicator: its operations are queued behind the current stream.

    They return at once, and raise TransportFailure.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        """Does not connect yet: the first operation does, and all ranks have to enter it."""
        self.timeout_s = timeout_s
        self.aborted = False
        self._ended = False
        self._lock = threading.Lock()
        with _failing():
            self._group = nccl_group(store, rank, world, timeout_s)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> list[Work]:
        """Start all sends and receives as one operation, so that their order does not matter."""

        def begin() -> None:
            for tensor, rank in sends:
                self._group.send([tensor], rank, 0)
            for tensor, rank in receives:
                self._group.recv([tensor], rank, 0)

        with _failing():
            return coalesced(self._group, begin)

    def spread(self, pieces: Sequence[Piece]) -> list[Work]:
        """Start to send each piece from its rank to all others, in place, as one operation."""

        def begin() -> None:
            for tensor, rank in pieces:
                self._group.broadcast(tensor, rank)

        with _failing():
            return coalesced(self._group, begin)

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> list[Work]:
        """Start to gather `whole` from the parts of all ranks, of which `mine` is this rank's."""
        with _failing():
            return [all_gather(self._group, whole, mine)]

    def meet(self, device: torch.device) -> list[Work]:
        """Connect all ranks, as any first operation does."""
        with _failing():
            return [self._group.allreduce(torch.zeros(1, device=device))]

    def settle(self, works: Sequence[Work]) -> None:
        """Wait until `works` are over.

        `Work.wait` alone would neither return nor raise when another thread aborts the group. An aborted operation
        counts as completed, with anything in its buffer.
        """

        with _failing():
            wait_for(
                lambda: all(work.is_completed() for work in works),
                lambda: self.aborted,
                self.timeout_s,
                "NCCL: not done",
            )
            if self.aborted:
                raise TransportFailure("NCCL: the transfer was given up", peer_left=False)
            for work in works:
                work.wait()

    def give_up(self) -> None:
        """Let `settle` raise, whatever the operations say. Any thread, at any time."""
        self.aborted = True

    def abort(self) -> None:
        """End what is on its way, here and at the peers. Any thread, at any time."""
        self.give_up()
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            # It waits for NCCL, at most the group's time-out, and then raises.
            with suppress(RuntimeError):
                self._group.abort()


def in_time(connect: Callable[[], None], timeout_s: float) -> None:
    """Run `connect` on the current GPU and give up on it after `timeout_s`: nothing else would end it.

    Raises TransportFailure.
    """
    number = torch.cuda.current_device()

    def connect_there() -> None:
        torch.cuda.set_device(number)  # a new thread begins on GPU 0
        connect()

    try:
        in_thread(connect_there, "sync-nccl").result(timeout_s)
    except TimeoutError:
        raise TransportFailure(f"NCCL did not connect the members within {timeout_s:g} s", peer_left=False) from None


def name_interface(interface: str) -> None:
    """Let NCCL's sockets use the network interface, unless the user has said which.

    Not for a member that knows its address only (an alias, a container): NCCL would look for an interface of that name.
    """
    if interface in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=`: exactly this name


@contextmanager
def _failing() -> Iterator[None]:
    """Turn whatever is raised into TransportFailure: the update is repeated, or goes over to sync.fallback."""
    try:
        yield
    except TransportFailure:
        raise
    except Exception as error:
        raise TransportFailure(f"NCCL: {error}", peer_left="remote" in str(error)) from error


class Nccl:
    """Exchange slices of buckets; see `Backend`.

    Each engine rank of a stream takes an equal slice of a bucket from its owners, all at once; then the slices go
    around among the engine ranks (all-gather). So the actor sends every byte once, over all its network interfaces, and
    NCCL's rings and NVLink spread it among the engines. Two communicators per rank, whatever the sizes.

    A bucket comes in on a stream of its own, while the engine loads the one before.
    """

    def __init__(self, plan: SyncPlan, rank: int, store: Store, timeout_s: float) -> None:
        """Uses the current CUDA device; needs `nccl_available()`. Collective. Raises TransportFailure."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.pool = Pool(self.device)
        self._plan = plan
        self._rank = rank
        self._side = torch.cuda.Stream(self.device)
        self._everybody = NcclCommunicator(PrefixStore("nccl", store), rank, plan.layout.world, timeout_s)
        self._communicators = [self._everybody]
        self._engines: NcclCommunicator | None = None
        if rank >= len(plan.layout.actors) and len(self._takers(plan.stream_to(rank))) > 1:
            taking = self._takers(plan.stream_to(rank))
            place = PrefixStore(f"nccl-{plan.stream_to(rank)}", store)
            self._engines = NcclCommunicator(place, taking.index(rank), len(taking), timeout_s)
            self._communicators.append(self._engines)
        # NCCL connects at the first use, all ranks together: now, so that no update has to.
        in_time(self._connect, timeout_s)

    def send(
        self, bucket: int, stream: int, part: BucketPart, buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()
    ) -> PendingTransfer:
        works = self._everybody.exchange(self._sends(bucket, stream, part, buffer), [])
        return Incoming(partial(self._settled, works, buffer))

    def receive(self, bucket: int) -> Incoming:
        stream = self._plan.stream_to(self._rank)
        taking, slices = self._takers(stream), self._slices(bucket, stream)
        step = slices[0][2] - slices[0][1]
        buffer = self.pool.take(step * len(taking))
        self._side.wait_stream(torch.cuda.current_stream(self.device))  # the buffer's memory may be in use there
        with torch.cuda.stream(self._side):
            works = self._everybody.exchange([], self._receives(bucket, stream, buffer))
            for work in works:
                work.synchronize()  # the side stream waits, and with it the all-gather
            if self._engines is not None:
                mine = taking.index(self._rank) * step
                works += self._engines.all_gather(buffer, buffer[mine : mine + step])
        return Incoming(partial(self._settled, works, buffer))

    def flush(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def abort(self) -> None:
        for communicator in self._communicators:
            communicator.give_up()
        # The engines' first: if only the exchange were aborted, a rank would gather bytes that it never received.
        for communicator in reversed(self._communicators):
            communicator.abort()

    close = abort

    def _settled(self, works: list[Work], buffer: torch.Tensor) -> torch.Tensor:
        """Wait for operations on their way, and return their buffer, which they keep until then."""
        self._everybody.settle(works)
        return buffer

    def _takers(self, stream: int) -> tuple[int, ...]:
        return tuple(r for node in self._plan.streams[stream].nodes for r in self._plan.layout.by_node[node])

    def _slices(self, bucket: int, stream: int) -> list[tuple[int, int, int]]:
        """(engine rank, low, high): equal parts of the bucket, the last reaching beyond its end."""
        taking, nbytes = self._takers(stream), self._plan.nbytes(bucket, stream)
        step = -(-nbytes // (len(taking) * ALIGN)) * ALIGN
        return [(rank, place * step, (place + 1) * step) for place, rank in enumerate(taking)]

    def _sends(self, bucket: int, stream: int, part: BucketPart, buffer: torch.Tensor) -> list[Piece]:
        """Cut this rank's part, which is in `buffer`, into the slices of the engine ranks."""
        found = []
        for rank, low, high in self._slices(bucket, stream):
            start, end = max(low, part.start), min(high, part.start + part.nbytes)
            if start < end:
                found.append((buffer[start - part.start : end - part.start], rank))
        return found

    def _receives(self, bucket: int, stream: int, buffer: torch.Tensor) -> list[Piece]:
        """Cut this rank's slice of the bucket in `buffer` into what each owner sends of it."""
        (low, high), *_ = [(low, high) for rank, low, high in self._slices(bucket, stream) if rank == self._rank]
        found = []
        for part in self._plan.parts(bucket, stream):
            start, end = max(low, part.start), min(high, part.start + part.nbytes)
            if start < end:
                found.append((buffer[start:end], part.owner))
        return found

    def _connect(self) -> None:
        """Connect every communicator, and every pair that will exchange bytes."""
        for communicator in self._communicators:
            communicator.settle(communicator.meet(self.device))
        sends: list[Piece] = []
        receives: list[Piece] = []
        token = torch.zeros(ALIGN, dtype=torch.uint8, device=self.device)
        for number, stream in enumerate(self._plan.streams):
            if self._rank in stream.owners:
                sends += [(token, rank) for rank in self._takers(number)]
            if self._rank in self._takers(number):
                receives += [(torch.empty_like(token), owner) for owner in stream.owners]
        self._everybody.settle(self._everybody.exchange(sends, receives))

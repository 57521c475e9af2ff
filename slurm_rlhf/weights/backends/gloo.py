"""Gloo: buckets in chunks along the plan's routes, between nodes over sockets, inside one through shared memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch.distributed import PrefixStore, Store, Work

from slurm_rlhf.process_groups._torch import gloo_group, prove
from slurm_rlhf.weights.backends import Incoming, PendingTransfer, TransportFailure
from slurm_rlhf.weights.backends.shared_memory import SharedMemory
from slurm_rlhf.weights.bucket import Pool, host_checksum
from slurm_rlhf.weights.routes import Route, partners, routes
from slurm_rlhf.weights.transfer_plan import DEPTH, BucketPart, SyncPlan

T = TypeVar("T")
_NEVER_SENT = 0x7FFFFFFF  # tag that no message has
_MEETING = 0x7FFFFFFE  # tag of the messages by which two members prove themselves
_LEFT = ("closed by peer", "reset by peer", "broken pipe", "connection refused")  # in errors of gloo: a peer is gone


class GlooPending:
    """Wait for one operation of gloo. Once a part of its bytes was transferred, only its time-out ends it."""

    def __init__(self, work: Work, buffer: torch.Tensor) -> None:
        self._work = work
        self._buffer = buffer  # gloo holds a bare pointer to it

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it is over, for `timeout_s` instead of the group's time-out if given. Raises TransportFailure."""
        limits = [] if timeout_s is None else [timedelta(seconds=timeout_s)]
        _raising(lambda: self._work.wait(*limits))


class GlooTransport:
    """Send and receive tensors over TCP between CPUs, in a group that belongs to no default group and needs none.

    Buffers are contiguous uint8 tensors [n]. After a failure or `abort` it is spent.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        address: str,
        timeout_s: float,
        await_peers: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect rank 0 and all others; ranks that exchange chunks connect by `meet`: a full mesh grows quadratically.

        The others connect to `address` of this node. `await_peers` blocks until all have come so far, and may raise.
        Raises TransportFailure.
        """
        self._rank = rank
        self._met: set[int] = set()
        self._whole, self._store = store, PrefixStore("gloo", store)  # kept: the group reads it later, when it connects
        self._group = _raising(lambda: gloo_group(self._store, rank, world, address, timeout_s, lazy=True))
        await_peers()
        self.stop = _Stop()
        self._sends = _worker("sync-sends")
        self.meet(range(1, world) if rank == 0 else (0,))

    def meet(self, peers: Iterable[int]) -> None:
        """Connect to `peers`, while they do the same, and let them prove themselves. Raises TransportFailure."""
        fresh = set(peers) - self._met - {self._rank}
        self._met.update(fresh)
        if fresh:
            receive, send = ((lambda *args, do=do: do(*args, _MEETING)) for do in (self.receive, self.send))
            _raising(lambda: prove(receive, send, self._store, self._rank, fresh))

    def send(self, buffer: torch.Tensor, to: int, tag: int, counted: _Counted | None = None) -> _Counted:
        """Start to send to one rank. Any thread; does not block. An abort wakes the thread that waits, at any point.

        `counted`: the counter of several chunks, of which this is one; None: a new counter.
        """
        pending = GlooPending(_raising(lambda: self._group.send([buffer], to, tag)), buffer)
        counted = counted or _Counted(1, self.stop)
        self._sends.put(_Task(counted, pending.wait))
        return counted

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> GlooPending:
        """Start to receive from one rank. Any thread; does not block; the group's time-out counts from `wait`."""
        return GlooPending(_raising(lambda: self._group.recv([buffer], source, tag)), buffer)

    def abort(self) -> None:
        """Fail whatever is pending, here and, because connections close, at the peers. Any thread, at any time."""
        # ProcessGroupGloo.abort() does nothing (torch 2.13). But a receive that times out closes every connection of
        # its group, which ends pending operations here and at the peers. Those that have transferred a part of their
        # bytes go on: `stop` ends the waiting for them.
        nothing = torch.zeros(1, dtype=torch.uint8)
        for peer in list(self._met):
            with suppress(RuntimeError):
                self._group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        self.stop.set()
        self._sends.put(None)

    close = abort
    """Give the connections back after the last operation. Does not wait for the peers."""


def _raising(operation: Callable[[], T]) -> T:
    try:
        return operation()
    except RuntimeError as error:
        text = str(error)
        raise TransportFailure(text, peer_left=any(mark in text.lower() for mark in _LEFT)) from error


class _Stop:
    """End all waiting of a transport: gloo does not end a partly done operation when its connection closes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: TransportFailure | None = None

    def set(self) -> None:
        with self.changed:
            self.failure = self.failure or TransportFailure("the transfer was given up", peer_left=False)
            self.changed.notify_all()


class _Counted:
    """Wait for chunks on their way: threads count them down, and leave here the sends by which they forward them."""

    def __init__(self, chunks: int, stop: _Stop) -> None:
        self._left = chunks
        self._failure: TransportFailure | None = None
        self._stop = stop
        self._changed = stop.changed
        self._handed_on: deque[PendingTransfer] = deque()

    def came(self, handed_on: list[PendingTransfer]) -> None:
        with self._changed:
            self._handed_on.extend(handed_on)
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def failed(self, failure: TransportFailure) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait(self) -> None:
        # The chunks have the group's time-out, and whatever happens to them is reported here.
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0 or self._failure or self._stop.failure)
            failure = self._failure or (self._stop.failure if self._left else None)
            if failure is not None:
                raise failure

    def drain(self) -> None:
        """Wait until everything that this rank hands on has been taken, too."""
        self.wait()
        while self._handed_on:
            self._handed_on.popleft().wait()


class Gloo:
    """Exchange chunks; see `Backend`. Each rank that chunks come from has a thread: a slow one delays no other."""

    def __init__(self, plan: SyncPlan, rank: int, transport: GlooTransport, memory: SharedMemory | None = None) -> None:
        """`memory`: that of this rank's node, if it shares some with others. Collective. Raises TransportFailure."""
        self.device = transport.device
        self.pool = Pool(self.device, memory.nbytes if memory else 0)
        self._plan = plan
        self._rank = rank
        self._node = plan.layout.node(rank)
        self._transport = transport
        self._memory = memory
        self._stop = transport.stop
        self._threads: dict[int, SimpleQueue[_Task | None]] = {}
        self._arrivals: deque[_Counted] = deque()
        self._number = 0  # number of the first bucket of this update in the shared memory
        self._mates = plan.layout.by_node.get(self._node, ())
        by_wire = [peer for peer in partners(plan, rank) if memory is None or plan.layout.node(peer) != self._node]
        transport.meet(by_wire)

    def send(
        self, bucket: int, stream: int, part: BucketPart, buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()
    ) -> PendingTransfer:
        sent: list[tuple[torch.Tensor, int, int]] = []
        copied: list[int] = []
        for index, route in enumerate(routes(self._plan, bucket, stream)):
            if route.owner != self._rank:
                continue
            view = _outgoing(route, part, buffer, apart)
            for taker in route.takers(self._rank):
                if self._memory is not None and self._plan.layout.node(taker) == self._node:
                    copied.append(index)
                else:
                    sent.append((view, taker, route.tag))
        counted = _Counted(len(sent) + bool(copied), self._stop)
        for chunk in sent:
            self._transport.send(*chunk, counted)
        if copied and self._memory is not None:
            copy = partial(_copy, self._memory, self._number + bucket, copied, part, (buffer, *apart))
            self._thread(self._rank).put(_Task(counted, copy))
        return counted

    def receive(self, bucket: int) -> Incoming:
        stream = self._plan.stream_to(self._rank)
        while len(self._arrivals) > DEPTH - 2:
            self._arrivals.popleft().drain()
        taken = list(routes(self._plan, bucket, stream))
        nbytes = self._plan.nbytes(bucket, stream)
        number = self._number + bucket
        buffer = self._memory.slot(number)[:nbytes] if self._memory else self.pool.take(nbytes)
        mine = [(index, route) for index, route in enumerate(taken) if self._comes_by_wire(route)]
        counted, sums = _Counted(len(mine), self._stop), dict[int, int]()
        apart = self._plan.parts(bucket, stream)[0].start  # each chunk before this offset is one piece
        # All receives first: then no sender waits for a handshake.
        for index, route in mine:
            giver, view = route.giver(self._rank), buffer[route.low : route.high]
            pending = self._transport.receive(view, giver, route.tag)
            summed = self._memory is None and route.high <= apart
            take = partial(self._take, pending, view, route, number, index, sums if summed else None)
            self._thread(giver).put(_Task(counted, take))
        self._arrivals.append(counted)
        if self._memory is None:
            return Incoming(partial(_when_complete, counted, deque([buffer])), sums=sums)
        return self._shared(number, len(taken), nbytes, counted)

    def _shared(self, number: int, chunks: int, nbytes: int, counted: _Counted) -> Incoming:
        """Receive a bucket in the node's shared memory."""
        memory, reader = self._memory, self._mates.index(self._rank)
        assert memory is not None

        def wait() -> torch.Tensor:
            counted.wait()  # this rank's own chunks come first: their failures are the connection's
            return memory.wait(number, chunks)[:nbytes]

        return Incoming(wait, partial(memory.give_back, number, reader), lent=True)

    def flush(self) -> None:
        while self._arrivals:
            self._arrivals.popleft().drain()
        self._number += len(self._plan.buckets)

    def abort(self) -> None:
        if self._memory is not None:
            self._memory.abort()
        self._transport.abort()

    def close(self) -> None:
        for queue in self._threads.values():
            queue.put(None)
        self._threads, self._memory = {}, None

    def _take(
        self,
        pending: PendingTransfer,
        view: torch.Tensor,
        route: Route,
        number: int,
        index: int,
        sums: dict[int, int] | None,
    ) -> list[PendingTransfer]:
        """Wait for chunk `index` of bucket `number`, which comes into `view`, and hand it on inside the node.

        `sums` gets its checksum; None: the chunk is not one whole piece, or readers sum it when they copy it.
        """
        pending.wait()
        if self._memory is not None:
            self._memory.mark(number, [index])
            return []
        handed_on: list[PendingTransfer] = [
            self._transport.send(view, taker, route.tag) for taker in route.takers(self._rank)
        ]
        if sums is not None:  # while the bytes are in the processor's cache, and the next chunks arrive
            sums[route.low] = host_checksum(view)
        return handed_on

    def _comes_by_wire(self, route: Route) -> bool:
        return self._memory is None or self._plan.layout.node(route.giver(self._rank)) != self._node

    def _thread(self, giver: int) -> SimpleQueue[_Task | None]:
        if giver not in self._threads:
            self._threads[giver] = _worker(f"sync-from-{giver}")
        return self._threads[giver]


def _copy(
    memory: SharedMemory, number: int, chunks: list[int], part: BucketPart, given: Sequence[torch.Tensor]
) -> None:
    """Copy a part for the engine ranks of the owner's own node; `given`: its own bytes, and its pieces apart."""
    slot = memory.slot(number)
    for start, data in zip(_starts(part), given, strict=True):
        slot[start : start + data.numel()].copy_(data)
    memory.mark(number, chunks)


def _outgoing(route: Route, part: BucketPart, buffer: torch.Tensor, apart: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a chunk of this rank's own part: it lies in `buffer`, or in one of the pieces apart."""
    given = zip(_starts(part), (buffer, *apart), strict=True)
    start, data = max((each for each in given if each[0] <= route.low), key=lambda each: each[0])
    return data[route.low - start : route.high - start]


def _starts(part: BucketPart) -> list[int]:
    """Return the offsets in the bucket's buffer of a part's own bytes, and of its pieces apart."""
    return [part.start, *(piece.offset for piece in part.apart)]


def _when_complete(counted: _Counted, kept: deque[torch.Tensor]) -> torch.Tensor:
    """Wait for a bucket in this rank's own memory, and return its last reference: then views keep the memory."""
    counted.wait()
    return kept.pop()


@dataclass(slots=True)
class _Task:
    """Do the work on a chunk, and count the chunk."""

    counted: _Counted
    work: Callable[[], list[PendingTransfer] | None]  # returns the sends that it has started, of bytes that it forwards

    def run(self) -> None:
        handed_on = self.work()
        del self.work  # frees the buffer, before it is taken again
        self.counted.came(handed_on or [])


def _worker(name: str) -> SimpleQueue[_Task | None]:
    """Start a thread that does what is put into the queue, until None is."""
    queue: SimpleQueue[_Task | None] = SimpleQueue()
    threading.Thread(target=_work, args=(queue,), name=name, daemon=True).start()
    return queue


def _work(queue: SimpleQueue[_Task | None]) -> None:
    while (task := queue.get()) is not None:
        try:
            task.run()
        except TransportFailure as failure:
            task.counted.failed(failure)
        except Exception as error:  # a thread's end must not leave the update waiting
            task.counted.failed(TransportFailure(f"{type(error).__name__}: {error}", peer_left=False))
        del task  # so that no buffer is kept while the thread waits for the next task

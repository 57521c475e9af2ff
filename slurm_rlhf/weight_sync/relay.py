"""Buckets in chunks from rank to rank along the plan's routes, and through shared memory inside a node."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from slurm_rlhf.weight_sync.backends.backend import Incoming
from slurm_rlhf.weight_sync.backends.shared_memory import Shelf
from slurm_rlhf.weight_sync.backends.transport import Pending, Transport, TransportFailure
from slurm_rlhf.weight_sync.buffers import Pool
from slurm_rlhf.weight_sync.plan import Part, SyncPlan
from slurm_rlhf.weight_sync.routes import Route, routes


class _All:
    """Operations that are over when all of them are."""

    def __init__(self, works: list[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        while self._works:
            self._works.pop().wait()


class _Stop:
    """Ends all waiting of a relay: gloo leaves a receive that is half done alone when its connection is closed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: TransportFailure | None = None

    def set(self) -> None:
        with self.changed:
            self.failure = self.failure or TransportFailure("the transfer was given up", peer_left=False)
            self.changed.notify_all()


class _Counted:
    """Chunks that are still to come; threads count them down, and keep what they handed on."""

    def __init__(self, chunks: int, stop: _Stop) -> None:
        self._left = chunks
        self._failure: TransportFailure | None = None
        self._stop = stop
        self._changed = stop.changed
        self._handed_on: deque[Pending] = deque()

    def came(self, handed_on: list[Pending]) -> None:
        with self._changed:
            self._handed_on.extend(handed_on)
            self._left -= 1
            self._changed.notify_all()

    def failed(self, failure: TransportFailure) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait(self) -> None:
        # The chunks have the group's time-out, and whatever happens to them is told here.
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


class _Owned:
    """A bucket in memory of this rank's own."""

    lent = False

    def __init__(self, buffer: torch.Tensor, counted: _Counted) -> None:
        self._buffer: torch.Tensor | None = buffer
        self._counted = counted

    def wait(self) -> torch.Tensor:
        self._counted.wait()
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        return buffer

    def release(self) -> None:
        pass


class _Shelved:
    """A bucket in the node's shared memory."""

    lent = True

    def __init__(self, shelf: Shelf, number: int, chunks: int, nbytes: int, reader: int, counted: _Counted) -> None:
        self._shelf = shelf
        self._number = number
        self._chunks = chunks
        self._nbytes = nbytes
        self._reader = reader
        self._counted = counted

    def wait(self) -> torch.Tensor:
        self._counted.wait()  # what this rank itself brings in: its failures are the connection's own
        return self._shelf.wait(self._number, self._chunks)[: self._nbytes]

    def release(self) -> None:
        # Handing on reads the slot as well.
        self._counted.drain()
        self._shelf.give_back(self._number, self._reader)


class Relay:
    """See `Carrier`. One thread per rank that chunks come from: a slow one holds up nobody else's."""

    def __init__(self, plan: SyncPlan, rank: int, transport: Transport, shelf: Shelf | None = None) -> None:
        """`shelf`: this rank's node's, where it shares one with other members."""
        self.device = transport.device
        self.pool = Pool(self.device)
        self.pool.peak = shelf.nbytes if shelf else 0
        self._plan = plan
        self._rank = rank
        self._node = plan.layout.node(rank)
        self._transport = transport
        self._shelf = shelf
        self._stop = _Stop()
        self._threads: dict[int, SimpleQueue[_Task | None]] = {}
        self._arrivals: deque[_Counted] = deque()
        self._number = 0  # of the first bucket of this update on the shelf
        self._mates = plan.layout.by_node.get(self._node, ())

    def send(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> Pending:
        works: list[Pending] = []
        shelved: list[int] = []
        for index, route in enumerate(routes(self._plan, bucket, stream)):
            if route.owner != self._rank:
                continue
            view = buffer[route.low - part.start : route.high - part.start]
            for taker in route.takers(self._rank):
                if self._shelf is not None and self._plan.layout.node(taker) == self._node:
                    shelved.append(index)
                else:
                    works.append(self._transport.send(view, taker, route.tag))
        if shelved and self._shelf is not None:
            counted = _Counted(1, self._stop)
            self._thread(self._rank).put(_Shelve(self._shelf, self._number + bucket, shelved, part, buffer, counted))
            works.append(counted)
        return _All(works)

    def receive(self, bucket: int) -> Incoming:
        stream = self._plan.stream_to(self._rank)
        while len(self._arrivals) > self._plan.depth - 2:
            self._arrivals.popleft().drain()
        taken = list(routes(self._plan, bucket, stream))
        nbytes = self._plan.nbytes(bucket, stream)
        number = self._number + bucket
        buffer = self._shelf.slot(number)[:nbytes] if self._shelf else self.pool.take(nbytes)
        mine = [(index, route) for index, route in enumerate(taken) if self._comes_by_wire(route)]
        counted = _Counted(len(mine), self._stop)
        # All receives first: then no sender waits for a handshake.
        for index, route in mine:
            giver, view = route.giver(self._rank), buffer[route.low : route.high]
            pending = self._transport.receive(view, giver, route.tag)
            self._thread(giver).put(_Chunk(self, pending, view, route, number, index, counted))
        self._arrivals.append(counted)
        if self._shelf is None:
            return _Owned(buffer, counted)
        return _Shelved(self._shelf, number, len(taken), nbytes, self._mates.index(self._rank), counted)

    def flush(self) -> None:
        while self._arrivals:
            self._arrivals.popleft().drain()
        self._number += len(self._plan.buckets)

    def abort(self) -> None:
        if self._shelf is not None:
            self._shelf.abort()
        self._transport.abort()
        self._stop.set()

    def close(self) -> None:
        for queue in self._threads.values():
            queue.put(None)
        self._threads = {}
        self._shelf = None

    def hand_on(self, route: Route, view: torch.Tensor, number: int, index: int) -> list[Pending]:
        """A chunk has come: to those who get it from this rank."""
        takers = route.takers(self._rank)
        if self._shelf is not None:
            self._shelf.mark(number, [index])
            takers = tuple(taker for taker in takers if taker not in self._mates)
        return [self._transport.send(view, taker, route.tag) for taker in takers]

    def _comes_by_wire(self, route: Route) -> bool:
        return self._shelf is None or self._plan.layout.node(route.giver(self._rank)) != self._node

    def _thread(self, giver: int) -> SimpleQueue[_Task | None]:
        if giver not in self._threads:
            queue: SimpleQueue[_Task | None] = SimpleQueue()
            self._threads[giver] = queue
            threading.Thread(target=_work, args=(queue,), name=f"sync-from-{giver}", daemon=True).start()
        return self._threads[giver]


@dataclass(slots=True)
class _Chunk:
    """A chunk that comes from another rank."""

    relay: Relay
    pending: Pending
    view: torch.Tensor
    route: Route
    number: int  # of its bucket on the shelf
    index: int  # among the bucket's chunks
    counted: _Counted

    def run(self) -> None:
        self.pending.wait()
        self.counted.came(self.relay.hand_on(self.route, self.view, self.number, self.index))


@dataclass(slots=True)
class _Shelve:
    """A part that goes to engine ranks of the owner's own node."""

    shelf: Shelf
    number: int  # of the bucket on the shelf
    chunks: list[int]
    part: Part
    buffer: torch.Tensor
    counted: _Counted

    def run(self) -> None:
        slot = self.shelf.slot(self.number)
        slot[self.part.start : self.part.start + self.part.nbytes].copy_(self.buffer)
        self.shelf.mark(self.number, self.chunks)
        self.counted.came([])


_Task = _Chunk | _Shelve


def _work(queue: SimpleQueue[_Task | None]) -> None:
    while (task := queue.get()) is not None:
        try:
            task.run()
        except TransportFailure as failure:
            task.counted.failed(failure)
        except Exception as error:  # a thread's end must not leave the update waiting
            task.counted.failed(TransportFailure(f"{type(error).__name__}: {error}", peer_left=False))
        del task  # the queue is waited for with nothing in hand

"""Buckets in chunks from rank to rank along the plan's routes: the carrier of gloo and NCCL."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue

import torch

from slurm_rlhf.sync.plan import Part, SyncPlan
from slurm_rlhf.sync.route import routes
from slurm_rlhf.sync.transport import Pending, Transport, TransportFailure


class _Chunks:
    """Operations that are over when all of them are."""

    def __init__(self, works: list[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        while self._works:
            self._works.pop().wait()


class _Arrival:
    """A bucket's chunks that are still to come; threads count them down."""

    def __init__(self, chunks: int) -> None:
        self._left = chunks
        self._failure: TransportFailure | None = None
        self._changed = threading.Condition()
        self.handed_on: deque[Pending] = deque()

    def came(self, handed_on: list[Pending]) -> None:
        with self._changed:
            self.handed_on.extend(handed_on)
            self._left -= 1
            self._changed.notify_all()

    def failed(self, failure: TransportFailure) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait(self) -> None:
        # The chunks have the group's time-out, and whatever happens to them is told here.
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0 or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def drain(self) -> None:
        """Wait until everything that this rank hands on has been taken."""
        self.wait()
        while self.handed_on:
            self.handed_on.popleft().wait()


_Item = tuple[Pending, torch.Tensor, tuple[int, ...], int, _Arrival]


class Relay:
    """See `Carrier`. One thread per rank that chunks come from: a slow one holds up nobody else's."""

    def __init__(self, plan: SyncPlan, rank: int, transport: Transport) -> None:
        self.device = transport.device
        self._plan = plan
        self._rank = rank
        self._transport = transport
        self._sources: dict[int, SimpleQueue[_Item | None]] = {}
        self._arrivals: deque[_Arrival] = deque()

    def send(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> Pending:
        return _Chunks(
            [
                self._transport.send(buffer[route.low - part.start : route.high - part.start], taker, route.tag)
                for route in routes(self._plan, bucket, stream)
                if route.owner == self._rank
                for taker in route.takers(self._rank)
            ]
        )

    def receive(self, bucket: int, stream: int, buffer: torch.Tensor) -> Pending:
        while len(self._arrivals) > 1:
            self._arrivals.popleft().drain()
        taken = list(routes(self._plan, bucket, stream))
        arrival = _Arrival(len(taken))
        # All receives first: then no sender waits for a handshake.
        for route in taken:
            giver, view = route.giver(self._rank), buffer[route.low : route.high]
            pending = self._transport.receive(view, giver, route.tag)
            self._queue(giver).put((pending, view, route.takers(self._rank), route.tag, arrival))
        self._arrivals.append(arrival)
        return arrival

    def flush(self) -> None:
        while self._arrivals:
            self._arrivals.popleft().drain()

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        for queue in self._sources.values():
            queue.put(None)
        self._sources = {}

    def _queue(self, giver: int) -> SimpleQueue[_Item | None]:
        if giver not in self._sources:
            queue: SimpleQueue[_Item | None] = SimpleQueue()
            self._sources[giver] = queue
            threading.Thread(target=self._pump, args=(queue,), name=f"sync-from-{giver}", daemon=True).start()
        return self._sources[giver]

    def _pump(self, queue: SimpleQueue[_Item | None]) -> None:
        while (item := queue.get()) is not None:
            pending, view, takers, tag, arrival = item
            try:
                pending.wait()
                arrival.came([self._transport.send(view, taker, tag) for taker in takers])
            except TransportFailure as failure:
                arrival.failed(failure)
            except Exception as error:  # a thread's end must not leave the update waiting
                arrival.failed(TransportFailure(f"{type(error).__name__}: {error}", peer_left=False))
            del item, pending, view, arrival  # the queue is waited for with nothing in hand

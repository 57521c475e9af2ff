"""NCCL: between GPUs, one rank each. Run through stand-ins, not on GPUs yet."""

from __future__ import annotations

import torch
from torch.distributed import PrefixStore, Store, Work

from slurm_rlhf.weight_sync.backends.backend import Incoming
from slurm_rlhf.weight_sync.backends.transport import Pending
from slurm_rlhf.weight_sync.buffers import Pool
from slurm_rlhf.weight_sync.communicator import Communicator, Piece, in_time
from slurm_rlhf.weight_sync.plan import ALIGN, Part, SyncPlan


class _Done:
    """Operations of a communicator, and their buffer."""

    lent = False

    def __init__(self, communicator: Communicator, works: list[Work], buffer: torch.Tensor) -> None:
        self._communicator = communicator
        self._works = works
        self._buffer = buffer

    def wait(self) -> torch.Tensor:
        self._communicator.settle(self._works)
        return self._buffer

    def release(self) -> None:
        pass


class Nccl:
    """See `Carrier`. Each engine rank of a stream takes an equal slice of a bucket from its owners, all at once; then
    the slices go around among the engine ranks (all-gather). So the actor sends every byte once, over all its rails,
    and NCCL's rings and NVLink do what the relays do over sockets. Two communicators per rank, whatever the sizes.

    A bucket comes in on a stream of its own, beside what the engine loads of the bucket before.
    """

    def __init__(self, plan: SyncPlan, rank: int, store: Store, timeout_s: float) -> None:
        """Uses the current CUDA device; needs `nccl_available()`. Collective. Raises TransportFailure."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.pool = Pool(self.device)
        self._plan = plan
        self._rank = rank
        self._side = torch.cuda.Stream(self.device)
        self._everybody = Communicator(PrefixStore("nccl", store), rank, plan.layout.world, timeout_s)
        self._communicators = [self._everybody]
        self._engines: Communicator | None = None
        if rank >= len(plan.layout.actors) and len(self._takers(plan.stream_to(rank))) > 1:
            taking = self._takers(plan.stream_to(rank))
            place = PrefixStore(f"nccl-{plan.stream_to(rank)}", store)
            self._engines = Communicator(place, taking.index(rank), len(taking), timeout_s)
            self._communicators.append(self._engines)
        # Connections come to be when they are used first, with all ranks together: now, and not in an update.
        in_time(self._connect, timeout_s)

    def send(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> Pending:
        works = self._everybody.exchange(self._sends(bucket, stream, part, buffer), [])
        return _Done(self._everybody, works, buffer)

    def receive(self, bucket: int) -> Incoming:
        stream = self._plan.stream_to(self._rank)
        taking, slices = self._takers(stream), self._slices(bucket, stream)
        step = slices[0][2] - slices[0][1]
        buffer = self.pool.take(step * len(taking))
        self._side.wait_stream(torch.cuda.current_stream(self.device))  # whose memory the buffer was before
        with torch.cuda.stream(self._side):
            works = self._everybody.exchange([], self._receives(bucket, stream, buffer))
            for work in works:
                work.synchronize()  # the side stream waits, and with it the all-gather
            if self._engines is not None:
                mine = taking.index(self._rank) * step
                works += self._engines.all_gather(buffer, buffer[mine : mine + step])
        return _Done(self._everybody, works, buffer)

    def flush(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def abort(self) -> None:
        # The last first: with its exchange given up, a rank would hand its neighbours what it does not have.
        for communicator in reversed(self._communicators):
            communicator.abort()

    def close(self) -> None:
        self.abort()

    def _takers(self, stream: int) -> tuple[int, ...]:
        return tuple(r for node in self._plan.streams[stream].nodes for r in self._plan.layout.by_node[node])

    def _slices(self, bucket: int, stream: int) -> list[tuple[int, int, int]]:
        """(engine rank, low, high): equal parts of the bucket, the last reaching beyond its end."""
        taking, nbytes = self._takers(stream), self._plan.nbytes(bucket, stream)
        step = -(-nbytes // (len(taking) * ALIGN)) * ALIGN
        return [(rank, place * step, (place + 1) * step) for place, rank in enumerate(taking)]

    def _sends(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> list[Piece]:
        """What of this rank's part each engine rank's slice has; `buffer` is the part's."""
        found = []
        for rank, low, high in self._slices(bucket, stream):
            start, end = max(low, part.start), min(high, part.start + part.nbytes)
            if start < end:
                found.append((buffer[start - part.start : end - part.start], rank))
        return found

    def _receives(self, bucket: int, stream: int, buffer: torch.Tensor) -> list[Piece]:
        """What of each part this rank's slice has; `buffer` is the bucket's."""
        (low, high), *_ = [(low, high) for rank, low, high in self._slices(bucket, stream) if rank == self._rank]
        found = []
        for part in self._plan.parts(bucket, stream):
            start, end = max(low, part.start), min(high, part.start + part.nbytes)
            if start < end:
                found.append((buffer[start:end], part.owner))
        return found

    def _connect(self) -> None:
        """Every communicator, and every pair that will exchange bytes."""
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

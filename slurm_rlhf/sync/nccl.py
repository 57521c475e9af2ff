"""NCCL: between GPUs, one rank each. Not run yet: no machine with GPUs was at hand."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, Work

from slurm_rlhf.sync.buffers import Pool
from slurm_rlhf.sync.carrier import Incoming
from slurm_rlhf.sync.plan import ALIGN, Part, SyncPlan
from slurm_rlhf.sync.transport import Pending, TransportFailure

_POLL_S = 0.0005


def nccl_available() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def device_name() -> str:
    """What no two GPUs share; empty without one. Uses the current device."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def device_names() -> list[str]:
    """`device_name` of every GPU that this process sees, by its number here."""
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def device_address() -> str:
    """The current GPU's PCI address, as the kernel spells it; empty without one."""
    if not torch.cuda.is_available():
        return ""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


class _Done:
    """Work on NCCL's stream, polled: `Work.wait` only orders streams, and a peer that left would show as a hang."""

    lent = False

    def __init__(self, carrier: Nccl, works: list[Work], buffer: torch.Tensor) -> None:
        self._carrier = carrier
        self._works = works
        self._buffer = buffer
        self._deadline = time.monotonic() + carrier.timeout_s

    def wait(self) -> torch.Tensor:
        try:
            while not all(work.is_completed() for work in self._works):
                if self._carrier.aborted:
                    raise TransportFailure("the NCCL group was aborted", peer_left=False)
                if time.monotonic() > self._deadline:
                    raise TransportFailure(f"NCCL: not done after {self._carrier.timeout_s:g} s", peer_left=False)
                time.sleep(_POLL_S)
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise TransportFailure(str(error), peer_left="remote" in str(error)) from error
        return self._buffer

    def release(self) -> None:
        pass


class Nccl:
    """See `Carrier`. Each engine rank of a stream takes an equal slice of a bucket from its owners, all at once; then
    the slices go around among the engine ranks (all-gather). So the actor sends every byte once, over all its rails,
    and NCCL's rings and NVLink do what the relays do over sockets. Two communicators per rank, whatever the sizes.
    """

    def __init__(self, plan: SyncPlan, rank: int, store: Store, timeout_s: float) -> None:
        """Uses the current CUDA device; needs `nccl_available()`. Collective. Raises TransportFailure."""
        self.timeout_s = timeout_s
        self.aborted = False
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.pool = Pool(self.device)
        self._plan = plan
        self._rank = rank
        self._everybody = _group(PrefixStore("nccl", store), rank, plan.layout.world, timeout_s)
        self._engines: Any = None
        if rank >= len(plan.layout.actors):
            taking = self._takers(plan.stream_to(rank))
            place = PrefixStore(f"nccl-{plan.stream_to(rank)}", store)
            self._engines = _group(place, taking.index(rank), len(taking), timeout_s)
        # Communicators are made at the first use, by all ranks together: now, and not in an update.
        warm = torch.zeros(1, device=self.device)
        _Done(self, [self._everybody.allreduce(warm)], warm).wait()

    def send(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> Pending:
        return _Done(self, self._exchange(self._slices(bucket, stream), [part], buffer), buffer)

    def receive(self, bucket: int) -> Incoming:
        stream = self._plan.stream_to(self._rank)
        taking, slices = self._takers(stream), self._slices(bucket, stream)
        step = slices[0][2] - slices[0][1]
        buffer = self.pool.take(step * len(taking))
        works = self._exchange(slices, list(self._plan.parts(bucket, stream)), buffer)
        mine = taking.index(self._rank) * step
        for work in works:
            work.wait()  # on the stream, so that the all-gather comes after it
        works = [*works, self._engines._allgather_base(buffer, buffer[mine : mine + step])]
        return _Done(self, works, buffer)

    def flush(self) -> None:
        torch.cuda.synchronize(self.device)

    def abort(self) -> None:
        self.aborted = True
        for group in (self._everybody, self._engines):
            if group is not None:
                group.abort()

    def close(self) -> None:
        self.abort()

    def _takers(self, stream: int) -> tuple[int, ...]:
        return tuple(r for node in self._plan.streams[stream].nodes for r in self._plan.layout.by_node[node])

    def _slices(self, bucket: int, stream: int) -> list[tuple[int, int, int]]:
        """(engine rank, low, high): equal parts of the bucket, the last reaching beyond its end."""
        taking, nbytes = self._takers(stream), self._plan.nbytes(bucket, stream)
        step = -(-nbytes // (len(taking) * ALIGN)) * ALIGN
        return [(rank, place * step, (place + 1) * step) for place, rank in enumerate(taking)]

    def _exchange(self, slices: list[tuple[int, int, int]], parts: list[Part], buffer: torch.Tensor) -> list[Work]:
        """This rank's sends or receives of a bucket, as one NCCL operation: their order plays no part."""
        works = []
        self._everybody._start_coalescing(self.device)
        for part in parts:
            for rank, low, high in slices:
                start, end = max(low, part.start), min(high, part.start + part.nbytes)
                if start >= end:
                    continue
                if part.owner == self._rank:
                    view = buffer[start - part.start : end - part.start]
                    works.append(self._everybody.send([view], rank, 0))
                elif rank == self._rank:
                    works.append(self._everybody.recv([buffer[start:end]], part.owner, 0))
        whole = self._everybody._end_coalescing(self.device)
        return [whole] if whole is not None else works


def _group(store: Store, rank: int, world: int, timeout_s: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # NCCL's own watchdog ends the whole process; ours raises, and has to be first.
    options._timeout = timedelta(seconds=2 * timeout_s + 60)
    try:
        return ProcessGroupNCCL(store, rank, world, options)
    except RuntimeError as error:
        raise TransportFailure(str(error), peer_left=False) from error

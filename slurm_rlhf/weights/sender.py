"""The actor's end of a transfer: every rank writes its own part of each bucket, and sends it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import SyncBroken, SyncError
from slurm_rlhf.records import StoreAddress, SyncConnection, SyncReport
from slurm_rlhf.weights.backends.backend import PendingTransfer
from slurm_rlhf.weights.backends.table import make_backend
from slurm_rlhf.weights.bucket import Pool, Source, fill
from slurm_rlhf.weights.group import Described, SyncGroup, connection, join_run
from slurm_rlhf.weights.rendezvous import SyncStore
from slurm_rlhf.weights.transfer_plan import DEPTH, ITEM_SIZE, BucketPart, Span, SyncPlan, dtype_name
from slurm_rlhf.weights.update import following, leading

Held = Mapping[str, tuple[int, torch.Tensor]]
"""What a rank has of each parameter: index of its first element in the flat parameter, and the elements [n]."""


class Sender:
    """Send updates, as an actor rank of a group."""

    def __init__(self, group: SyncGroup, plan: SyncPlan) -> None:
        """Make the backend, together with the other members. Raises SyncError."""
        group.agree(plan.fingerprint())
        self.group = group
        self.plan = plan
        self.backend = make_backend(group, plan)
        self._pool = Pool(self.backend.device)

    @property
    def peak(self) -> int:
        """Return the bytes of memory held at a time: of this rank's parts, and on a GPU of whole buckets, too."""
        return self._pool.peak + (self.backend.pool.peak if self.backend.device.type == "cuda" else 0)

    def push(self, held: Held, version: int) -> SyncReport:
        """Send this rank's share of policy `version`; on rank 0, return when every engine rank has loaded it.

        Raises SyncError within `timeout.sync`, naming the member that died, hangs or refused; the group is spent.
        """
        start = time.monotonic()
        frame = leading if self.group.rank == 0 else following
        with frame(self.group, version):
            source = span_source(self.plan, held)
            filling = self._send(source, version)
            self.backend.flush()
        return SyncReport(nbytes=self.plan.payload, seconds=time.monotonic() - start, checksum_s=filling)

    def _send(self, source: Source, version: int) -> float:
        """Send this rank's parts; return the seconds in which they were written, their checksums included."""
        on_the_way: deque[tuple[int, PendingTransfer]] = deque()
        buffers = DEPTH - 1  # two at least: one is filled while the other is on its way
        filling = 0.0
        for bucket in range(len(self.plan.buckets)):
            while on_the_way and on_the_way[0][0] <= bucket - buffers:
                on_the_way.popleft()[1].wait()
            for stream, part in self._mine(bucket):
                buffer = self._pool.take(part.nbytes)
                started = time.monotonic()
                apart = fill(buffer, part, bucket, version, source, self._pool)
                filling += time.monotonic() - started
                on_the_way.append((bucket, self.backend.send(bucket, stream, part, buffer, apart)))
                del buffer, apart
        while on_the_way:
            on_the_way.popleft()[1].wait()
        return filling

    def _mine(self, bucket: int) -> list[tuple[int, BucketPart]]:
        return [
            (stream, part)
            for stream, taking in enumerate(self.plan.streams)
            if self.group.rank in taking.owners
            for part in self.plan.parts(bucket, stream)
            if part.owner == self.group.rank
        ]


_CONNECTED = ("gloo", "disk")
"""Backends that need no further connection to the store; NCCL, and ipc that gathers with it, make some later."""


class ActorEnd:
    """Answer the weight sync calls of a run, as an actor rank: groups come and go, updates may be repeated."""

    def __init__(self, config: Config, label: str) -> None:
        self._config = config
        self._label = label
        self._sender: Sender | None = None
        self._stores: list[SyncStore] = []

    def listen(self, host: str) -> StoreAddress:
        """Open the store where the members of the next group meet. Raises SyncError."""
        # That of the group before stays until then: its members may still read there why it ended.
        self._stores = [*self._stores[-1:], SyncStore.listen(host, self._config.timeout.sync)]
        return StoreAddress(self._stores[-1].host, self._stores[-1].port)

    def join(self, parameters: Described, **group: Any) -> SyncConnection:
        """Leave the group there was and join the one that `group` describes, in `Membership`'s words.

        Returns how this rank is connected. Raises SyncError, ConfigError.
        """
        if self._sender is not None:
            self._sender.group.close()
        joined, plan = join_run(self._config, self._label, parameters, group)
        self._sender = Sender(joined, plan)
        if self._stores and joined.backend in _CONNECTED:
            self._stores[-1].shut()
        return connection(joined)

    def push(self, held: Held, version: int) -> SyncReport:
        """Send this rank's share as policy `version`; report where it broke off and a new group may help.

        Raises SyncError for everything else.
        """
        assert self._sender is not None
        try:
            return self._sender.push(held, version)
        except SyncBroken as broken:
            return SyncReport(broken=str(broken), silent=broken.hang)


def span_source(plan: SyncPlan, held: Held) -> Source:
    """Read spans from what this rank holds. Raises SyncError where that is not what the plan says."""
    for parameter in plan.parameters:
        if parameter.name not in held:
            raise SyncError(f"the actor has no parameter {parameter.name!r}, which is in the plan")
        found = dtype_name(held[parameter.name][1].dtype)
        if found != parameter.dtype:
            raise SyncError(f"the actor's parameter {parameter.name!r} is {found}, the plan says {parameter.dtype}")
    if len(held) > len(plan.parameters):
        unknown = next(name for name in held if name not in {p.name for p in plan.parameters})
        raise SyncError(f"the actor has a parameter {unknown!r} that is not in the plan")

    def read(span: Span) -> torch.Tensor:
        parameter = plan.parameters[span.parameter]
        first, elements = held[parameter.name]
        size = ITEM_SIZE[parameter.dtype]
        low, high = span.low // size - first, span.high // size - first
        if low < 0 or high > elements.numel():
            raise SyncError(
                f"this rank holds elements {first} to {first + elements.numel()} of {parameter.name!r}, the plan wants "
                f"{span.low // size} to {span.high // size} of {parameter.numel} from it"
            )
        return elements[low:high].view(torch.uint8)

    return read

"""The actor's end: parameters into buckets, buckets to every engine rank, and their word that they loaded them."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.bucket import fill
from slurm_rlhf.sync.group import SyncGroup
from slurm_rlhf.sync.plan import dtype_name, make_plan
from slurm_rlhf.sync.transport import Pending, TransportFailure

REPORT_TAG = 1
REPORT_BYTES = 8
"""A receiver's word that it has loaded an update."""
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class SyncStats:
    """One finished update, as seen by one end."""

    version: int
    nbytes: int  # on the wire, per receiver
    buckets: int
    seconds: float  # from the first byte to the last receiver's word


class Sender:
    """Rank 0 of a group. Keeps two buffers of a bucket each: one is filled while the other is on its way."""

    def __init__(self, group: SyncGroup, described: Sequence[Sequence[Any]], bucket_bytes: int) -> None:
        """`described`: [[name, shape, dtype], ...] in the order in which `push` will get the parameters."""
        self.group = group
        self.plan = make_plan(described, bucket_bytes)
        buffers = min(2, len(self.plan.buckets))
        self._buffers = torch.zeros(buffers, self.plan.largest, dtype=torch.uint8, device=group.data.device)
        try:
            group.store.set("plan", json.dumps(self.plan.to_wire()))
        except RuntimeError as error:
            raise SyncError(f"group {group.name}: the store is gone: {error}") from error

    def push(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncStats:
        """Send parameters `named` as policy `version`; return when every receiver has loaded them.

        A tensor that comes again under another name (tied weights) is sent once. Raises SyncError within
        `timeout.sync`, naming the receiver that died, hangs or refused; the group is spent then.
        """
        self.group.check()
        start = time.monotonic()
        watch = _Watch(self.group)
        try:
            self._send(distinct(named), version)
            watch.join()
        except TransportFailure as error:
            watch.drop()
            verdict = f"weight update to policy version {version} failed: {self.group.ended or self._judge(watch.left)}"
            self._give_up(verdict)
            raise SyncError(verdict) from error
        except BaseException as error:
            self._give_up(f"{self.group.me} gave up the update to policy version {version}: {error}")
            raise
        return SyncStats(version, self.plan.nbytes, len(self.plan.buckets), time.monotonic() - start)

    def _send(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        pending: Pending | None = None
        for index, bucket in enumerate(self.plan.buckets):
            buffer = self._buffers[index % len(self._buffers)][: bucket.nbytes]
            fill(buffer, bucket, index, version, weights)
            if pending is not None:
                pending.wait()
            pending = self.group.data.broadcast(buffer, 0)
        for name, _ in weights:
            raise SyncError(f"the actor has a parameter {name!r} that is not in the plan")
        if pending is not None:
            pending.wait()

    def _judge(self, left: set[int]) -> str:
        names = {member.rank: str(member) for member in self.group.members}
        return self.group.board.judge(self.group.peers, left, names, self.group.timeout_s)

    def _give_up(self, verdict: str) -> None:
        self.group.board.publish(verdict)
        self.group.abort(verdict)


def described(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[Any]]:
    """The list that `Sender` wants of the parameters that `push` will get."""
    return [[name, list(tensor.shape), dtype_name(tensor.dtype)] for name, tensor in distinct(named)]


def distinct(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out tensors that came before under another name.

    Weak references: memory that a gathered parameter gave back may be the next one's, and is no tie.
    """
    seen: dict[tuple[int, torch.Size, torch.dtype], weakref.ref[torch.Tensor]] = {}
    for name, tensor in named:
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        earlier = seen[key]() if key in seen else None
        if tensor.numel() and earlier is not None and earlier.data_ptr() == key[0]:
            continue
        seen[key] = weakref.ref(tensor)
        yield name, tensor


class _Watch:
    """One thread per receiver, waiting for its report all through the update.

    So a receiver that dies is noticed at once and by name, whoever it was exchanging data with; the failure wakes the
    thread that sends.
    """

    def __init__(self, group: SyncGroup) -> None:
        self.left: set[int] = set()  # receivers whose connection closed
        self._group = group
        self._failure: TransportFailure | None = None
        self._dropping = threading.Lock()
        self._dropped = False
        self._threads = [
            threading.Thread(target=self._wait, args=(rank,), name=f"sync-report-{rank}", daemon=True)
            for rank in group.peers
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all reports. Raises TransportFailure."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def drop(self) -> None:
        """Let go of all connections, so that every member notices; those that closed before are in `left`."""
        with self._dropping:
            if not self._dropped:
                time.sleep(_SETTLE_S)  # a death closes several connections, one after the other
                self._dropped = True
                self._group.drop()

    def _wait(self, rank: int) -> None:
        try:
            self._group.control.receive(torch.zeros(REPORT_BYTES, dtype=torch.uint8), rank, REPORT_TAG).wait()
        except TransportFailure as error:
            if self._dropped:
                return
            self._failure = error
            if error.peer_left:
                self.left.add(rank)
            self.drop()

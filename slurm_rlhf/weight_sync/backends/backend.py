"""The seam between weight sync and the ways on which buckets travel: relays over gloo, NCCL, shared memory, files.

A carrier is one member's end. What went wrong comes as TransportFailure; the group finds out who.
"""

from __future__ import annotations

from typing import Protocol

import torch

from slurm_rlhf.weight_sync.backends.transport import Pending
from slurm_rlhf.weight_sync.buffers import Pool
from slurm_rlhf.weight_sync.plan import Part


class Incoming(Protocol):
    """A bucket on its way to an engine rank."""

    lent: bool
    """The buffer is used again after `release`; else whoever keeps a view keeps the memory."""

    def wait(self) -> torch.Tensor:
        """The bucket, uint8 [plan.nbytes(bucket, stream)], when all of it is there. Raises TransportFailure."""
        ...

    def release(self) -> None:
        """Nothing more is read from the buffer."""
        ...


class Carrier(Protocol):
    """Buckets go in order, update after update. After a failure or `abort` a carrier is spent."""

    device: torch.device
    """Where the buffers are."""
    pool: Pool
    """Of the buckets that come in; its peak tells how much they take."""

    def send(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> Pending:
        """An actor rank's part of a bucket, uint8 [part.nbytes], to the engine ranks of a stream. Called by the thread
        that runs the update; does not block; `wait` returns when the buffer may be reused."""
        ...

    def receive(self, bucket: int) -> Incoming:
        """An engine rank's next bucket, up to `plan.depth - 2` ahead of the one that is waited for. Called by the
        thread that runs the update; blocks only while others of this node still take the buckets before."""
        ...

    def flush(self) -> None:
        """Wait, at most the group's time-out per chunk, until nothing of this member's is on its way any more: the end
        of an update, called by the same thread."""
        ...

    def abort(self) -> None:
        """Fail whatever is pending, here and at the members it talks to. Any thread, at any time."""
        ...

    def close(self) -> None:
        """Give back connections, memory and files. Does not wait for the others."""
        ...

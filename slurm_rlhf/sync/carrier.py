"""The seam between weight sync and the ways on which buckets travel: relays over gloo or NCCL, shared memory, files.

A carrier is one member's end. What went wrong comes as TransportFailure; the group finds out who.
"""

from __future__ import annotations

from typing import Protocol

import torch

from slurm_rlhf.sync.plan import Part
from slurm_rlhf.sync.transport import Pending


class Carrier(Protocol):
    """Buffers are uint8 tensors on `device`. After a failure or `abort` the carrier is spent."""

    device: torch.device

    def send(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> Pending:
        """An actor rank's part of a bucket, uint8 [part.nbytes], to the engine ranks of a stream. Called in the order
        of buckets by the thread that runs the update; does not block; `wait` returns when the buffer may be reused."""
        ...

    def receive(self, bucket: int, stream: int, buffer: torch.Tensor) -> Pending:
        """A whole bucket into an engine rank's buffer. Called in the order of buckets, one ahead of the one that is
        waited for; blocks only while siblings still take a bucket before the last; `wait` returns when all is there."""
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

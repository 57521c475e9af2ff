"""Backends: the ways on which buckets of weights travel, behind one seam, `Backend`.

A backend is one member's end of such a way: `gloo` (chunks over sockets, and through `shared_memory` inside a node),
`nccl`, `device_ipc` (memory of one GPU) and `disk`; `table` makes the one that the members agreed on. The group finds
out who is behind a `TransportFailure`. To add one: .github/CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from slurm_rlhf.polling import wait_until
from slurm_rlhf.weights.bucket import Pool
from slurm_rlhf.weights.transfer_plan import BucketPart
from slurm_rlhf.wire import timeouts


class TransportFailure(Exception):
    """Report a failed operation; the group turns it into a SyncError that names who is missing."""

    def __init__(self, message: str, *, peer_left: bool) -> None:
        super().__init__(message)
        self.peer_left = peer_left  # a connection closed, as opposed to a time-out


def wait_for(
    ready: Callable[[], bool],
    given_up: Callable[[], bool],
    timeout_s: float,
    late: str,
    pauses: tuple[float, float] = (timeouts.DEVICE_POLL_S, timeouts.DEVICE_POLL_S),
) -> None:
    """Block until `ready`. Raises TransportFailure when the transfer is given up meanwhile, or after the time-out.

    `late`: text of the error after it; `pauses`: the first and the longest pause between two checks, in seconds.
    """

    def over() -> bool:
        done = ready()
        if not done and given_up():
            raise TransportFailure("the transfer was given up", peer_left=False)
        return done

    if not wait_until(over, timeout_s, *pauses):
        raise TransportFailure(f"{late} after {timeout_s:g} s", peer_left=False)


class PendingTransfer(Protocol):
    """Wait for an operation on its way. Keep it: dropping it may cancel the operation."""

    def wait(self) -> None:
        """Block until the buffer may be used. Raises TransportFailure: a peer left, the group's time-out, an abort."""


class Done:
    """A `PendingTransfer` that is over."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A bucket on its way to an engine rank."""

    wait: Callable[[], torch.Tensor]
    """Block until all of the bucket is there, uint8 [plan.nbytes(bucket, stream)] or more. Raises TransportFailure."""
    release: Callable[[], None] = lambda: None
    """Say that nothing more is read from the buffer."""
    lent: bool = False
    """True: the buffer is used again after `release`. False: its memory lives as long as a view of it."""
    sums: Mapping[int, int] = field(default_factory=dict)
    """Offset of a piece in the bucket -> its checksum, computed as it arrived; complete after `wait`."""


class Backend(Protocol):
    """Move buckets, which go in order, update after update. After a failure or `abort` a backend is spent."""

    device: torch.device
    """Device of the buffers."""
    pool: Pool
    """Memory of the buckets that come in; its peak is how much they take."""

    def send(
        self, bucket: int, stream: int, part: BucketPart, buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()
    ) -> PendingTransfer:
        """Start to send an actor rank's part of a bucket, uint8 [part.nbytes], to the engine ranks of a stream.

        `apart`: the bytes of `part.apart`, where the plan's layout is `chunked`; memory of the actor's own parameters.

        Called by `Sender`, in the thread that runs the update. Does not block. `wait` of what it returns blocks until
        the buffer may be used again, at most the group's time-out.
        """

    def receive(self, bucket: int) -> Incoming:
        """Start to receive an engine rank's next bucket, up to `DEPTH - 2` ahead of the one that is waited for.

        Called by `Receiver`, in the thread that runs the update. Blocks only while others of this node still take the
        buckets before, at most the group's time-out. `wait` of what it returns has the group's time-out, too.
        """

    def flush(self) -> None:
        """Wait until all transfers of this member are over: the end of an update.

        Called by `Sender` and `Receiver`, in the thread that runs the update. Blocks, at most the group's time-out for
        each chunk.
        """

    def abort(self) -> None:
        """Fail whatever is pending, here and at the members it talks to.

        Called by `SyncGroup`, in any thread and at any time. Does not wait for the others; NCCL needs up to the group's
        time-out.
        """

    def close(self) -> None:
        """Give back connections, memory and files.

        Called by `SyncGroup`, after the last update. Blocks as `abort` does.
        """

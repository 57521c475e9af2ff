"""The seam between relays and what moves bytes from one rank to another.

A transport is one rank's end of a process group that already exists. Its operations are asynchronous.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """An operation on its way. Keep it: dropping it may cancel the operation."""

    def wait(self) -> None:
        """Block until the buffer may be used. Raises TransportFailure: a peer left, the group's time-out, an abort."""


class Transport(Protocol):
    """Buffers are contiguous uint8 tensors [n] on `device`. After a failure or `abort` the transport is spent."""

    device: torch.device

    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        """`buffer` to one rank. Any thread; does not block; the group's time-out counts from `wait`."""
        ...

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """`buffer` from one rank. Any thread; does not block; the group's time-out counts from `wait`."""
        ...

    def abort(self) -> None:
        """Fail whatever is pending, here and, because connections close, at the peers. Any thread, at any time."""
        ...

    def close(self) -> None:
        """Give the connections back after the last operation. Does not wait for the peers."""
        ...


class TransportFailure(Exception):
    """An operation failed; the group turns it into a SyncError that names who is missing."""

    def __init__(self, message: str, *, peer_left: bool) -> None:
        super().__init__(message)
        self.peer_left = peer_left  # a connection closed, as opposed to a time-out

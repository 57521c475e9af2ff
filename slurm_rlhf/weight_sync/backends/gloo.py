"""Gloo: TCP between CPUs. Built directly, it belongs to no default group and no default group needs to exist."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from slurm_rlhf.weight_sync.backends.transport import Pending, TransportFailure

T = TypeVar("T")
_NEVER_SENT = 0x7FFFFFFF  # a tag
_LEFT = ("closed by peer", "reset by peer", "broken pipe", "connection refused")


class GlooPending:
    def __init__(self, work: Work, buffer: torch.Tensor) -> None:
        self._work = work
        self._buffer = buffer  # gloo holds a bare pointer to it

    def wait(self) -> None:
        _raising(self._work.wait)

    def wait_within(self, timeout_s: float) -> None:
        """`wait` with a time-out of its own instead of the group's."""
        _raising(lambda: self._work.wait(timedelta(seconds=timeout_s)))


class GlooTransport:
    """See `Transport`. The others connect to `address` of this node. Raises TransportFailure."""

    device = torch.device("cpu")

    def __init__(self, store: Store, rank: int, world: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_raising(lambda: ProcessGroupGloo.create_device(hostname=address))]
        self._peers = [peer for peer in range(world) if peer != rank]
        self._group = _raising(lambda: ProcessGroupGloo(PrefixStore("gloo", store), rank, world, options))

    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        return GlooPending(_raising(lambda: self._group.send([buffer], to, tag)), buffer)

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> GlooPending:
        return GlooPending(_raising(lambda: self._group.recv([buffer], source, tag)), buffer)

    def abort(self) -> None:
        # ProcessGroupGloo.abort() does nothing (torch 2.13). A receive that times out, however, closes every
        # connection of its group, and with them ends whatever is pending on them, here and at the peers.
        nothing = torch.zeros(1, dtype=torch.uint8)
        for peer in self._peers:
            with suppress(RuntimeError):
                self._group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self.abort()


def _raising(operation: Callable[[], T]) -> T:
    try:
        return operation()
    except RuntimeError as error:
        text = str(error)
        raise TransportFailure(text, peer_left=any(mark in text.lower() for mark in _LEFT)) from error

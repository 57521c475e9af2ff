"""Waits of a transfer that is given up in the middle of a chunk: gloo itself wakes none of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import HANG_S

from slurm_rlhf.errors import SyncBroken
from slurm_rlhf.weights.backends import TransportFailure
from slurm_rlhf.weights.backends.gloo import GlooTransport
from slurm_rlhf.weights.rendezvous import SyncStore, connect
from slurm_rlhf.weights.update import _Deadline, _ended, _error, _last_message, _reports

NBYTES = 128 << 20  # more than the buffers of a connection hold
STOPPED = f"""
import os, signal, sys, torch
from slurm_rlhf.weights.backends.gloo import GlooTransport
from slurm_rlhf.weights.rendezvous import connect
store = connect("127.0.0.1", int(sys.argv[1]), "group", {HANG_S}, {HANG_S})
transport = GlooTransport(store, 1, 2, "127.0.0.1", {HANG_S})
pending = transport.receive(torch.zeros({NBYTES}, dtype=torch.uint8), 0, 1)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def transport() -> Iterator[GlooTransport]:
    """Rank 0; rank 1 has asked for a chunk and stands still, as one that nothing reaches any more."""
    server = SyncStore.listen("127.0.0.1", HANG_S)
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(server.port)]) as other:
        try:
            store = connect("127.0.0.1", server.port, "group", HANG_S, HANG_S)
            made = GlooTransport(store, 0, 2, "127.0.0.1", HANG_S)
            _, status = os.waitpid(other.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            yield made
            made.close()
        finally:
            other.kill()


def test_an_abort_wakes_who_waits_for_a_chunk_that_is_half_sent(transport: GlooTransport) -> None:
    pending = transport.send(torch.zeros(NBYTES, dtype=torch.uint8), 1, 1)
    small = transport.send(torch.zeros(8, dtype=torch.uint8), 1, 2)  # behind it, as a report would be
    threading.Timer(0.5, transport.abort).start()
    for each in (pending, small):
        with pytest.raises(TransportFailure):
            each.wait()


class Stuck:
    """A receive that gloo does not wake, whose preamble has come and whose bytes have not."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self, timeout_s: float | None = None) -> None:
        self.over.wait(HANG_S)


@pytest.mark.parametrize("waiting", [_reports, _last_message])
def test_dropped_connections_wake_who_waits_for_a_report_that_came_in_half(waiting: Any) -> None:
    stuck, dropped = Stuck(), threading.Event()
    group = SimpleNamespace(peers=(1,), actors=1, timeout_s=HANG_S, dropped=dropped, drop=dropped.set)
    group.control = SimpleNamespace(receive=lambda *_: stuck)
    group.report_silence = lambda quiet: None
    waits = waiting(group)
    threading.Timer(0.2, waits.miss, ((1,),)).start()
    with pytest.raises(TransportFailure):
        waits.join()
    stuck.over.set()


@pytest.mark.parametrize("waiting", [_reports, _last_message])
def test_whatever_ends_the_thread_that_waits_for_a_report_ends_the_update(
    waiting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def receive(*_: Any) -> Any:
        raise MemoryError("no room for a message")

    dropped = threading.Event()
    group = SimpleNamespace(peers=(1,), actors=1, timeout_s=HANG_S, dropped=dropped, drop=dropped.set)
    group.control = SimpleNamespace(receive=receive)
    waits = waiting(group)
    with pytest.raises(TransportFailure, match="MemoryError: no room for a message"):
        waits.join()
    assert dropped.wait(HANG_S)
    assert "the thread that waits for a report of the update failed" in caplog.text


def test_an_update_past_its_time_may_be_repeated_and_one_that_a_member_ended_may_not() -> None:
    group: Any = SimpleNamespace(timeout_s=0.1, late=False, ended="")
    over = threading.Event()

    def abort(reason: str) -> None:
        group.ended = reason
        over.set()

    group.abort = abort
    _Deadline(group, 3)
    assert over.wait(HANG_S)
    late = _error(_ended(group))
    assert isinstance(late, SyncBroken)
    assert late.hang
    assert str(late) == "policy version 3 was not everywhere after 0.15 s (timeout.sync)"
    group.late = False
    refused = _error(_ended(group))
    assert not isinstance(refused, SyncBroken)
    assert not refused.hang

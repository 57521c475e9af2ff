"""Connections of a weight transfer: who listens, who is refused, and messages that stop half way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import HANG_S

from slurm_rlhf.errors import SyncBroken
from slurm_rlhf.weights.backends import TransportFailure
from slurm_rlhf.weights.backends.gloo import Gloo, GlooTransport
from slurm_rlhf.weights.rendezvous import connect, listen
from slurm_rlhf.weights.routes import partners, routes
from slurm_rlhf.weights.transfer_plan import SyncPlan, TransferLayout, make_plan
from slurm_rlhf.weights.update import DONE_TAG, REPORT_TAG, _Deadline, _ended, _error, _Messages

SHAPES = {  # actor nodes, ranks on each, engine nodes, ranks on each
    "one actor rank": (1, 1, 1),
    "two actor nodes": (2, 4, 1),
    "as many actors as engines": (None, 1, 1),
    "whole nodes of eight": (2, 8, 8),
}


def planned(shape: str, engines: int, zero: int = 3) -> SyncPlan:
    actor_nodes, actor_ranks, ranks = SHAPES[shape]
    actors = [f"a{i}" for i in range(actor_nodes or engines) for _ in range(actor_ranks)]
    nodes = [f"e{i}" for i in range(engines // ranks) for _ in range(ranks)]
    return make_plan([["p", [4000, 256], "bf16"]], 1 << 19, TransferLayout(tuple(actors), tuple(nodes), zero), 1 << 12)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_owner_is_connected_to_one_rank_of_each_node(shape: str) -> None:
    """Connected are rank 0 and all others, and the pairs that exchange chunks over a wire."""
    plan = planned(shape, 64)
    pairs = {(0, rank) for rank in range(1, plan.layout.world)}
    for rank in range(plan.layout.world):
        node = plan.layout.node(rank)
        pairs |= {tuple(sorted((rank, peer))) for peer in partners(plan, rank) if plan.layout.node(peer) != node}
    assert len(pairs) <= len(plan.layout.actors) * len(plan.layout.by_node) + plan.layout.world - 1


def test_a_single_owner_is_connected_to_all_ranks_of_a_node_which_take_turns() -> None:
    plan = make_plan([["p", [4000, 256], "bf16"]], 1 << 19, TransferLayout(("a",), ("p",) * 4), 1 << 12)
    assert partners(plan, 0) == (1, 2, 3, 4)
    taken = Counter(route.entries[0] for bucket in range(len(plan.buckets)) for route in routes(plan, bucket, 0))
    assert max(taken.values()) <= 1.1 * min(taken.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_partners_are_those_of_the_routes_on_both_sides(shape: str) -> None:
    plan = planned(shape, 16)
    stated = {rank: set(partners(plan, rank)) for rank in range(plan.layout.world)}
    for bucket in range(len(plan.buckets)):
        for route in routes(plan, bucket, 0):
            for rank in (route.owner, *(rank for ranks in route.node_ranks for rank in ranks)):
                assert set(route.takers(rank)) <= stated[rank]
    assert all(rank in stated[peer] for rank, peers in stated.items() for peer in peers)


class Meeting:
    """In place of the transport: keeps whom a member connects to."""

    device, stop = torch.device("cpu"), None

    def meet(self, peers: Iterable[int]) -> None:
        self.met = set(peers)


def test_members_connect_to_whom_they_exchange_chunks_with_and_to_no_others() -> None:
    plan = planned("two actor nodes", 64)
    for rank in (0, 7, 8, 70):
        transport = Meeting()
        Gloo(plan, rank, transport)  # type: ignore[arg-type]
        assert transport.met == set(partners(plan, rank))
        assert rank < 8 or transport.met <= set(range(8)), "engines on other nodes have nothing to say to it"


def test_a_group_opens_connections_to_rank_0_and_no_others() -> None:
    world = 24
    store = listen("127.0.0.1", 30.0)
    clients = [connect("127.0.0.1", store.port, "group", 30.0, 10.0) for _ in range(world)]
    before = _sockets()
    with ThreadPoolExecutor(world) as threads:
        made = list(
            threads.map(lambda rank: GlooTransport(clients[rank], rank, world, "127.0.0.1", 30.0), range(world))
        )
        # Two ends of each connection, and where each member listens.
        assert _sockets() - before <= 2 * (world - 1) + 2 * world
        known = _sockets()
        for _ in range(2):  # they meet once
            list(threads.map(lambda pair: pair[0].meet(pair[1]), [(made[3], [9]), (made[9], [3])]))
            assert _sockets() == known + 2
        list(threads.map(GlooTransport.close, made))


def _sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd", name)
        found += link.is_symlink() and os.readlink(link).startswith("socket:")
    return found


# --- half sent --------------------------------------------------------------------------------------------------------


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
    server = listen("127.0.0.1", HANG_S)
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


def reports(group: Any) -> _Messages:
    return _Messages(group, group.peers, REPORT_TAG, None, 0.1)


def last_message(group: Any) -> _Messages:
    return _Messages(group, (0,), DONE_TAG, HANG_S, 0.0)


@pytest.mark.parametrize("waiting", [reports, last_message])
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


@pytest.mark.parametrize("waiting", [reports, last_message])
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
    assert str(late) == "policy version 3 did not reach all members in 0.15 s (timeout.sync)"
    group.late = False
    refused = _error(_ended(group))
    assert not isinstance(refused, SyncBroken)
    assert not refused.hang

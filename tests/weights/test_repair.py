"""Groups of weight transfers: how they form, of any size, and how they are repaired."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from shaped_links import available, shaped
from sync_fleet import Fleet, conducted, loaded, peers_in_roles, sent
from sync_peer import describe, make_weights
from waiting import HANG_S, scaled

from slurm_rlhf.errors import RemoteError, SyncError
from slurm_rlhf.weights.group import abort_newest, join
from slurm_rlhf.weights.rendezvous import Membership
from slurm_rlhf.wire import timeouts

pytestmark = [pytest.mark.slow]
ACTORS, ENGINES = 2, 2


@pytest.fixture(scope="module")
def roles():
    """The same for all tests: calls that one leaves behind have to end before those of the next."""
    with peers_in_roles(ACTORS, ENGINES) as made:
        yield made


@pytest.fixture
def sync(roles):
    """A WeightSync whose `timeout.sync` is short; half of it is for an operation."""
    return lambda **settings: conducted(roles, **({"timeout.sync": scaled(6.0)} | settings))


def _wake_after(pid: int, seconds: float) -> None:
    """Let a process go on so long after it has stopped."""
    while "State:\tT" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


PARAMETERS = describe(make_weights(0))


def assert_whole(weights: Any, version: int) -> None:
    """An update reaches all engines over a second group, which stays."""
    assert weights.update(version)["perf/sync_group"] == 2
    assert [loaded(weights, engine) for engine in range(ENGINES)] == [sent(version)] * ENGINES
    assert weights.update(version + 1)["perf/sync_group"] == 2


def test_an_engine_that_hung_gets_the_whole_update_over_a_new_group(sync, roles, monkeypatch):
    monkeypatch.setattr(timeouts, "TRANSFER_SLOW_S", HANG_S)
    weights = sync()
    weights.connect(PARAMETERS, [0, 1])
    assert weights.update(1)["perf/sync_group"] == 1
    weights.rollout.tell(1, "will", act="stop")
    hung = roles[1].peers[1]
    threading.Thread(target=_wake_after, args=(hung.pid, scaled(4.0)), daemon=True).start()
    assert_whole(weights, 2)


def test_a_leader_that_stood_still_repeats_the_update_and_does_the_next(sync, roles):
    """The others find by its heartbeats that it is silent, and give up: that is no refusal when it reads of it."""
    weights = sync(**{"timeout.sync": 60.0, "timeout.sync_silence": 2.0})
    weights.connect(PARAMETERS, [0, 1])
    leader = roles[0].peers[0]
    weights.rollout.tell(1, "will", act=f"suspend {leader.pid}")
    threading.Thread(target=_wake_after, args=(leader.pid, 5.0), daemon=True).start()
    assert_whole(weights, 1)


def test_a_group_of_fewer_engines_and_one_that_comes_late(sync):
    weights = sync()
    weights.connect(PARAMETERS, [1])
    weights.update(1)
    assert loaded(weights, 1) == sent(1)
    assert loaded(weights, 0) != sent(1)
    weights.connect(PARAMETERS, [0, 1])
    weights.update(2)
    assert [loaded(weights, engine) == sent(2) for engine in range(ENGINES)] == [True, True]


def test_what_an_engine_refuses_is_not_tried_again(sync):
    weights = sync()
    weights.connect(PARAMETERS, [0, 1])
    weights.rollout.tell(0, "will", act="damage")
    with pytest.raises(RemoteError, match="no room for this layer"):
        weights.update(1)
    assert weights.generation == 1


@pytest.mark.parametrize("fallback", ["none", "gloo"])
def test_a_backend_that_cannot_connect_ends_the_run_or_falls_back(sync, fallback):
    weights = sync(**{"sync.fallback": fallback, "timeout.sync": 3.0})
    weights.rollout.tell(0, "will", refusals=1)
    if fallback == "none":
        with pytest.raises((RemoteError, SyncError), match=r"no interface 'none9'|did not come within"):
            weights.connect(PARAMETERS, [0, 1])
        return
    weights.connect(PARAMETERS, [0, 1])
    weights.update(1)
    assert loaded(weights, 0) == sent(1)


@pytest.mark.skipif(not available(), reason="network namespaces need root")
def test_an_engine_in_a_subnet_out_of_reach_is_named_with_both_interfaces_or_reached_otherwise():
    """Both nodes have an ib0, in networks that nothing joins, as in the complaint this project began with."""
    with shaped(["near", "far"], "1gbit") as links, peers_in_roles(1, 1, links, ["near", "far"]) as roles:
        one, other = links.second("near", 1), links.second("far", 2)
        settings = {"sync.interface": "ib0", "sync.fallback": "none"}
        with pytest.raises(RemoteError) as caught:
            conducted(roles, links.address("near"), **settings).connect(PARAMETERS, [0])
        for words in (f"near (ib0, {one})", f"far (ib0, {other})", "Set sync.interface to a network"):
            assert words in str(caught.value)
        weights = conducted(roles, links.address("near"), **(settings | {"sync.fallback": "gloo"}))
        weights.connect(PARAMETERS, [0])
        weights.update(1)
        assert loaded(weights, 0) == sent(1)


# --- forming ----------------------------------------------------------------------------------------------------------


def test_members_do_not_wait_for_one_that_died_while_they_connect(fleet: Fleet) -> None:
    """It dies when all have met and none is connected; the conductor sees it, and has the leader give the group up."""
    fleet.hire(2)
    where: dict[str, Any] = {"name": "forming", "world": 3, "actors": 1, "host": "127.0.0.1"}
    where |= {"port": fleet.store.port, "timeout_s": HANG_S}
    survivor, victim = fleet.peers
    victim.tell("die_connecting")
    assert victim.answer() is None
    for rank, peer in enumerate(fleet.peers, 1):
        peer.tell("join", rank=rank, label=f"rollout {rank - 1}", **where)

    def conduct() -> None:
        victim.process.wait(HANG_S)
        abort_newest()

    watching = threading.Thread(target=conduct)
    watching.start()
    with pytest.raises(SyncError, match="an engine was lost before the group was formed"):
        join(Membership(rank=0, label="actor 0", **where))
    answer = survivor.answer()
    watching.join()
    assert answer["error"] == "SyncError"
    assert "an engine was lost before the group was formed" in answer["message"]
    fleet.dismiss()
    fleet.build(2)  # the survivor and a new one form the next group


# --- worlds -----------------------------------------------------------------------------------------------------------


def test_two_worlds_keep_their_own_groups_while_weights_go_across(sync, roles, tmp_path):
    """A sum over a role's ranks is over nobody else's."""
    ranks = [(role, rank, peer) for role, of_role in enumerate(roles, 1) for rank, peer in enumerate(of_role.peers)]

    def sums() -> list[list[int]]:
        for role, rank, peer in ranks:
            peer.tell("sum_in_world", value=10 * role + rank)
        return [peer.answer() for *_, peer in ranks]

    for role, rank, peer in ranks:
        peer.tell("found_world", path=str(tmp_path / f"{role}"), rank=rank)
    assert [peer.answer() for *_, peer in ranks] == [None] * 4
    weights = sync()
    weights.connect(PARAMETERS, [0, 1])
    for version in (1, 2):
        assert sums() == [[2, 21]] * 2 + [[2, 41]] * 2
        weights.update(version)
        assert [loaded(weights, engine) for engine in range(ENGINES)] == [sent(version)] * 2
    assert sums() == [[2, 21]] * 2 + [[2, 41]] * 2

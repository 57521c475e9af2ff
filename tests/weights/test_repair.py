"""The conductor's side of updates that break: aborted on both ends, repeated over a new group, or the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from shaped_links import available, shaped
from sync_fleet import PeerRanks, configure, loaded, sent
from sync_peer import Peer, describe, make_weights
from waiting import HANG_S, scaled

from slurm_rlhf.errors import RemoteError, SyncError
from slurm_rlhf.weights.lead import WeightSync
from slurm_rlhf.wire import timeouts

pytestmark = [pytest.mark.slow]
ACTORS, ENGINES = 2, 2


@pytest.fixture(scope="module")
def roles():
    """The same for all tests: calls that one leaves behind have to end before those of the next."""
    made = [Peer() for _ in range(ACTORS + ENGINES)]
    for peer in made:
        peer.wait_warm()
    yield PeerRanks(made[:ACTORS]), PeerRanks(made[ACTORS:])
    for peer in made:
        peer.end()


@pytest.fixture
def sync(roles):
    """A WeightSync over ZeRO-3 actor ranks; `timeout.sync` is short; half of it is for an operation."""

    def build(**settings: Any) -> WeightSync:
        settings = {"timeout.sync": scaled(6.0), "sync.bucket_mb": 1, "ds.zero_stage": 3} | settings
        for role, ranks in zip(("actor", "rollout"), roles, strict=True):
            for rank in range(ranks.world):
                ranks.tell(rank, "become", role=role, rank=rank, settings=settings)
        return WeightSync(configure(settings), *roles, "127.0.0.1")

    return build


def _wake_after(pid: int, seconds: float) -> None:
    """Let a process go on so long after it has stopped."""
    while "State:\tT" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


PARAMETERS = describe(make_weights(0))


def test_an_engine_that_hung_gets_the_whole_update_over_a_new_group(sync, roles, monkeypatch):
    monkeypatch.setattr(timeouts, "TRANSFER_SLOW_S", HANG_S)
    weights = sync()
    weights.connect(PARAMETERS, [0, 1])
    assert weights.update(1)["perf/sync_group"] == 1
    weights.rollout.tell(1, "will", act="stop")
    hung = roles[1].peers[1]
    threading.Thread(target=_wake_after, args=(hung.pid, scaled(4.0)), daemon=True).start()
    metrics = weights.update(2)
    assert metrics["perf/sync_group"] == 2
    for engine in range(ENGINES):
        assert loaded(weights, engine) == sent(2)
    assert weights.update(3)["perf/sync_group"] == 2


def test_a_leader_that_stood_still_repeats_the_update_and_does_the_next(sync, roles):
    """The others find by its heartbeats that it is silent, and give up: that is no refusal when it reads of it."""
    weights = sync(**{"timeout.sync": 60.0, "timeout.sync_silence": 2.0})
    weights.connect(PARAMETERS, [0, 1])
    leader = roles[0].peers[0]
    weights.rollout.tell(1, "will", act=f"suspend {leader.pid}")
    threading.Thread(target=_wake_after, args=(leader.pid, 5.0), daemon=True).start()
    metrics = weights.update(1)
    assert metrics["perf/sync_group"] == 2
    for engine in range(ENGINES):
        assert loaded(weights, engine) == sent(1)
    assert weights.update(2)["perf/sync_group"] == 2


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
    with shaped(["near", "far"], "1gbit") as links:
        one, other = links.second("near", 1), links.second("far", 2)
        peers = [Peer(links.inside("near"), "near"), Peer(links.inside("far"), "far")]
        try:
            for peer in peers:
                peer.wait_warm()
            actor, rollout = PeerRanks(peers[:1]), PeerRanks(peers[1:])
            for fallback in ("none", "gloo"):
                settings = {"timeout.sync": HANG_S, "sync.interface": "ib0", "sync.fallback": fallback}
                config = configure(settings)
                actor.tell(0, "become", role="actor", rank=0, settings=settings)
                rollout.tell(0, "become", role="rollout", rank=0, settings=settings)
                weights = WeightSync(config, actor, rollout, links.address("near"))  # type: ignore[arg-type]
                if fallback == "none":
                    with pytest.raises(RemoteError) as caught:
                        weights.connect(PARAMETERS, [0])
                    for words in (f"near (ib0, {one})", f"far (ib0, {other})", "Set sync.interface to a network"):
                        assert words in str(caught.value)
                    continue
                weights.connect(PARAMETERS, [0])
                weights.update(1)
                assert loaded(weights, 0) == sent(1)
        finally:
            for peer in peers:
                peer.end()


@pytest.mark.skipif(not available(), reason="network namespaces need root")
def test_both_interfaces_of_a_node_carry_their_share():
    """ZeRO-3 shards of two ranks of a node leave over two interfaces, and the other node takes each byte once."""
    with shaped(["near", "far"], "1gbit") as links:
        links.rail("1gbit")
        peers = [Peer(links.inside(node), node) for node in ("near", "near", "far", "far")]
        try:
            for peer in peers:
                peer.wait_warm()
            settings = {"timeout.sync": HANG_S, "sync.interface": "eth0,ib0", "ds.zero_stage": 3}
            actor, rollout = PeerRanks(peers[:2]), PeerRanks(peers[2:])
            for role, ranks in (("actor", actor), ("rollout", rollout)):
                for rank in range(ranks.world):
                    ranks.tell(rank, "become", role=role, rank=rank, settings=settings)
            weights = WeightSync(configure(settings), actor, rollout, links.address("near"))  # type: ignore[arg-type]
            weights.connect(PARAMETERS, [0, 1])
            before = {rail: links.sent("near", rail) for rail in ("eth0", "ib0")}
            nbytes = sum(weights.update(version)["perf/sync_bytes"] for version in (1, 2))
            carried = [links.sent("near", rail) - before[rail] for rail in before]
        finally:
            for peer in peers:
                peer.end()
    assert carried == pytest.approx([nbytes / 2] * 2, rel=0.1)

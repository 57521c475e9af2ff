"""Groups of weight transfers: how they form, of any size, and how they are repaired."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from shaped_links import available, shaped
from sync_fleet import Fleet, PeerRanks, configure, loaded, sent
from sync_peer import Peer, describe, make_weights
from waiting import HANG_S, scaled

from slurm_rlhf.errors import RemoteError, SyncError
from slurm_rlhf.weights.group import abort_newest, join
from slurm_rlhf.weights.lead import WeightSync
from slurm_rlhf.weights.rendezvous import Membership
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


# --- forming ----------------------------------------------------------------------------------------------------------


"""Time-out of the group: without a word from the conductor it would be waited for."""


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
        abort_newest("an engine was lost before the group was formed")

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


ROOT = Path(__file__).parents[2]
PROGRAM = '''
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from sync_peer import describe, hold
from waiting import HANG_S
from slurm_rlhf.weights.group import join
from slurm_rlhf.weights.rendezvous import Membership
from slurm_rlhf.weights.transfer_plan import make_plan
from slurm_rlhf.weights.ends import Sender
from slurm_rlhf.weights.ends import Receiver
from slurm_rlhf.weights.rendezvous import SyncStore

role, rank, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{place}/{role}", rank=rank, world_size=2)


def world_works():
    """A sum over this role's ranks, and over nobody else's."""
    ours = torch.tensor([rank + (10 if role == "actor" else 20)])
    dist.all_reduce(ours)
    return dist.get_world_size(), ours.item()


def weights(version):
    torch.manual_seed(version)
    return [(f"p{i}", torch.randn(300, 301)) for i in range(20)]


def sender():
    store = SyncStore.listen("localhost", timeout_s=HANG_S)
    (place / "port.new").write_text(str(store.port))
    (place / "port.new").rename(place / "port")
    group = join(Membership("weights", 0, 3, 1, "localhost", store.port, timeout_s=HANG_S, label="actor 0"))
    sender = Sender(group, make_plan(describe(weights(0)), 1 << 20, group.layout(0)))
    for version in (1, 2):
        sender.push(hold(weights(version)), version)
        print(*world_works())
    group.close()


def receiver():
    while not (place / "port").exists():
        time.sleep(0.05)
    port = int((place / "port").read_text())
    group = join(Membership("weights", 1 + rank, 3, 1, "localhost", port, timeout_s=HANG_S, label=f"rollout {rank}"))
    receiver = Receiver(group, make_plan(describe(weights(0)), 1 << 20, group.layout(0)))
    for version in (1, 2):
        with receiver.update(version) as arriving:
            loaded = dict(arriving)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(version)), version
        print(*world_works())
    group.close()


print(*world_works())
if role == "rollout":
    receiver()
elif rank == 0:
    sender()
else:
    for _ in range(2):
        print(*world_works())
dist.destroy_process_group()
'''


def test_two_worlds_keep_their_own_groups_while_weights_go_across(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, role, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for role in ("actor", "rollout")
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * 4, json.dumps(said, indent=1)
    assert [out.split("\n")[:-1] for out, _ in said] == [["2 21"] * 3, ["2 21"] * 3, ["2 41"] * 3, ["2 41"] * 3]

"""Updates of a run by its conductor, and from a DeepSpeed actor to a vLLM engine."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_cells import Cell, updates
from sync_fleet import BUCKET, Fleet
from sync_peer import Peer, describe, hold, make_weights
from waiting import HANG_S, scaled

from slurm_rlhf.cluster.network import address_of, interface_of
from slurm_rlhf.errors import ConfigError, SyncError
from slurm_rlhf.polling import wait_until
from slurm_rlhf.weights.backends import TransportFailure
from slurm_rlhf.weights.backends.gloo import GlooTransport
from slurm_rlhf.weights.ends import Receiver, Sender
from slurm_rlhf.weights.group import SyncGroup, join
from slurm_rlhf.weights.rendezvous import Membership
from slurm_rlhf.weights.routes import routes
from slurm_rlhf.weights.transfer_plan import DEPTH, make_plan

MARKS_OF_FIXTURES = {"fleet": "slow", "cell": "slow"}
PARAMETERS = describe(make_weights(0))
SHORT_S = float(round(scaled(3.0)))


def test_every_receiver_holds_what_was_sent_version_by_version(fleet):
    sender = fleet.sender(2)
    assert len(sender.plan.buckets) > 5
    for version in (1, 2, 7):
        fleet.update(sender, version)
    sender.group.close()
    for peer in fleet.peers:  # a peer that leaves in peace, too
        peer.tell("leave")
        assert peer.answer() is None
    with pytest.raises(SyncError, match="has ended: it was closed"):
        sender.push(hold(make_weights(8)), 8)


@pytest.mark.parametrize(
    ("actors", "receivers", "zero", "nodes"),
    [
        pytest.param(2, 2, 3, "aann", id="shards to one node"),
        pytest.param(2, 3, 3, "abpqr", id="shards to three nodes"),
        pytest.param(2, 3, 1, "axxxp", id="a node with both roles"),
        pytest.param(3, 1, 2, "aabp", id="more actors than engines"),
    ],
)
def test_parts_of_several_actor_ranks_make_whole_parameters(fleet, actors, receivers, zero, nodes):
    sender = fleet.sender(receivers, actors=actors, zero=zero, nodes=nodes)
    for version in (1, 2):
        fleet.update(sender, version)


def test_an_actor_rank_killed_half_way_is_named(fleet):
    sender = fleet.sender(1, actors=2, zero=3)
    dying, receiver = fleet.peers
    dying.tell("push", version=1, seed=1, seconds=0.3)
    receiver.tell("update", version=1)
    threading.Timer(0.8, os.kill, (dying.pid, signal.SIGKILL)).start()
    with pytest.raises(SyncError, match=rf"actor 1 on n \(pid {dying.pid}\) died"):
        sender.push(hold(make_weights(1), 0, 2), 1)
    assert f"actor 1 on n (pid {dying.pid}) died" in receiver.answer()["message"]
    fleet.peers.remove(dying)
    dying.end()


def test_a_receiver_that_hangs_is_named_after_the_timeout(fleet):
    sender = fleet.sender(2, layers=40, timeout_s=SHORT_S, silence_s=HANG_S)
    hanging, fine = fleet.peers
    hanging.tell("update", version=1, at=3, act="freeze")
    fine.tell("update", version=1)
    with pytest.raises(
        SyncError, match=rf"no answer from rollout 0 on .* within {SHORT_S:g} s \(timeout.sync\)"
    ) as caught:
        sender.push(hold(make_weights(0, 40)), 1)
    assert "rollout 1" not in str(caught.value)
    assert "rollout 0" in fine.answer()["message"]
    fleet.peers.remove(hanging)
    hanging.end()


def test_an_engine_that_loads_for_long_is_not_suspected_and_one_that_hangs_is(fleet):
    """Heartbeats tell them apart: they come while an engine loads and stay out when its process stands still."""
    sender = fleet.sender(1, layers=2, silence_s=scaled(1.0))
    (peer,) = fleet.peers
    peer.tell("update", version=1, at=3, act="slow", seconds=scaled(2.5))
    sender.push(hold(make_weights(1, 2)), 1)
    assert "1.weight" in peer.answer()
    peer.tell("update", version=2, at=3, act="freeze")
    with pytest.raises(SyncError, match=r"actor 0 on n \(.*\) heard nothing from rollout 0 on n .* or it hangs"):
        sender.push(hold(make_weights(2, 2)), 2)
    fleet.peers.remove(peer)
    peer.end()


@pytest.mark.parametrize(
    "act, expected",
    [("raise", "rollout 1 on .*: ValueError: no room for this layer"), ("abort", "rollout 1 .*asked by the conductor")],
)
def test_the_sender_learns_why_a_receiver_gave_up(fleet, act, expected):
    sender = fleet.sender(2)
    fine, failing = fleet.peers
    fine.tell("update", version=1)
    failing.tell("update", version=1, at=4, act=act, seconds=0.1)
    with pytest.raises(SyncError, match=expected) as raised:
        sender.push(hold(make_weights(0)), 1)
    assert type(raised.value) is SyncError  # a broken link would be tried again
    assert failing.answer()["error"] == ("ValueError" if act == "raise" else "SyncError")
    assert "rollout 1" in fine.answer()["message"]


def test_receivers_learn_why_the_sender_gave_up(fleet):
    sender = fleet.sender(2)
    for peer in fleet.peers:
        peer.tell("update", version=1)
    with pytest.raises(SyncError, match=r"no parameter '3\.half', which is in the plan"):
        sender.push(hold([pair for pair in make_weights(0) if pair[0] != "3.half"]), 1)
    for peer in fleet.peers:
        assert "no parameter '3.half'" in peer.answer()["message"]


def _receiver_here(fleet: Fleet, nodes: str) -> tuple[Peer, Receiver]:
    """Make this process the only engine rank of another process that is the actor."""
    fleet.hire(1)
    sender = fleet.peers[0]
    sender.tell("listen")
    where = {"name": f"here-{nodes}", "world": 2, "actors": 1, "host": "127.0.0.1", "port": sender.answer()}
    where["timeout_s"] = 30
    sender.tell("join", rank=0, label="actor 0", node=nodes[0], **where)
    group = join(Membership(rank=1, label="rollout 0", node=nodes[1], **where))
    sender.answer()
    sender.tell("sender_of", parameters=PARAMETERS, bucket=BUCKET)
    receiver = Receiver(group, make_plan(PARAMETERS, BUCKET, group.layout(0)))
    sender.answer()
    return sender, receiver


def test_a_sender_that_dies_is_named(fleet):
    sender, receiver = _receiver_here(fleet, "nn")
    fleet.peers.remove(sender)
    sender.tell("push", version=1, seed=1, seconds=0.2)
    arrived = []

    def load():
        with receiver.update(1) as weights:
            for name, _ in weights:
                arrived.append(name)
                if len(arrived) == 3:
                    sender.end()

    with pytest.raises(SyncError, match=rf"actor 0 on .*pid {sender.pid}\), which leads the update, is gone or hangs"):
        load()
    assert 3 <= len(arrived) < len(PARAMETERS)


def _is_there(receiver: Receiver, bucket: int, incoming: Any) -> bool:
    """Tell whether all chunks of a bucket are in this node's memory; nothing is asked for by looking."""
    memory = receiver.backend._memory
    if memory is None:
        return bool(incoming.wait.args[0]._left == 0)
    chunks = sum(1 for _ in routes(receiver.plan, bucket, 0))
    return bool((memory._filled[bucket % DEPTH, :chunks] == bucket + 1).all())


@pytest.mark.parametrize("nodes", ["an", "nn"], ids=["wire", "shared memory"])
def test_a_bucket_arrives_while_the_one_before_is_loaded(fleet, nodes):
    """Loading a bucket does not end before the next one is there. If that only came afterwards, it would never end."""
    sender, receiver = _receiver_here(fleet, nodes)
    plan, asked = receiver.plan, []
    complete_in = {
        piece.span.parameter: bucket
        for bucket in range(len(plan.buckets))
        for part in plan.parts(bucket, 0)
        for piece in part.pieces
    }
    receive = receiver.backend.receive
    receiver.backend.receive = lambda bucket: asked.append(receive(bucket)) or asked[-1]
    sender.tell("push", version=1, seed=1)
    last, waits = len(plan.buckets) - 1, 0
    with receiver.update(1) as weights:
        for number, (name, _) in enumerate(weights):
            assert name == plan.parameters[number].name
            following = complete_in[number] + 1
            if following <= last:
                assert len(asked) == following + 1, "it was not even asked for"
                assert wait_until(lambda: _is_there(receiver, following, asked[following]), HANG_S), (  # noqa: B023
                    f"bucket {following} waits for the engine"
                )
                waits += 1
    assert waits > 5
    assert sender.answer()["nbytes"] == plan.payload
    assert receiver.peak == receiver.backend.pool.peak + receiver.pool.peak
    if nodes == "nn":  # parameters are copied out of the shared memory, and that counts as well
        largest = max(parameter.nbytes for parameter in plan.parameters)
        assert receiver.peak >= receiver.backend._memory.nbytes + largest
    receiver.group.close()


def test_bytes_changed_on_the_way_are_named_on_both_ends(fleet):
    sender = fleet.sender(2)
    part = sender.plan.parts(2, 0)[0]
    damaged = next(p for p in part.pieces if sender.plan.parameters[p.span.parameter].name.endswith("weight"))
    name, at = sender.plan.parameters[damaged.span.parameter].name, part.apart.index(damaged)
    send = sender.backend.send

    def damaging(bucket: int, stream: int, sent: Any, buffer: torch.Tensor, apart: Sequence[torch.Tensor]):
        if bucket == 2:
            apart[at][1000] ^= 16
        return send(bucket, stream, sent, buffer, apart)

    sender.backend.send = damaging
    for peer in fleet.peers:
        peer.tell("update", version=4)
    with pytest.raises(SyncError, match=f"checksum of policy version 4 differs from that of actor 0 in {name} "):
        sender.push(hold(make_weights(0)), 4)
    for peer in fleet.peers:
        assert name in peer.answer()["message"]


def test_versions_have_to_agree_and_engines_to_read_everything(fleet):
    sender = fleet.sender(2)
    fleet.peers[0].tell("update", version=1)
    fleet.peers[1].tell("update", version=2)
    with pytest.raises(
        SyncError, match=r"rollout 1 .*expected bucket 0 of policy version 2, got bucket 0 of version 1"
    ):
        sender.push(hold(make_weights(0)), 1)
    for peer in fleet.peers:
        peer.answer()
    sender = fleet.sender(2)
    fleet.peers[0].tell("update", version=1)
    fleet.peers[1].tell("update", version=1, at=35, act="leave")
    with pytest.raises(SyncError, match=r"rollout 1 .*the engine left 1 of the 37 parameters unread"):
        sender.push(hold(make_weights(0)), 1)
    for peer in fleet.peers:
        peer.answer()


def test_another_architecture_names_both_ends(fleet):
    group = fleet.build(2)
    fleet.peers[0].tell("receiver_of", parameters=PARAMETERS, bucket=BUCKET, expected=PARAMETERS)
    other = [*PARAMETERS[:-1], ["11.other", [5, 3], "fp16"]]
    fleet.peers[1].tell("receiver_of", parameters=PARAMETERS, bucket=BUCKET, expected=other)
    with pytest.raises(
        SyncError, match=r"(?s)rollout 1 on .*11.other: \[3, 5\] at actor 0 on .* \[5, 3\] at rollout 1"
    ):
        Sender(group, make_plan(PARAMETERS, BUCKET, group.layout(0))).push(hold(make_weights(0)), 1)
    for peer in fleet.peers:
        assert "11.other: [3, 5] at actor 0 on" in peer.answer()["message"]


def test_members_with_two_plans_are_reported(fleet):
    group = fleet.build(1)
    fleet.peers[0].tell("receiver_of", parameters=PARAMETERS, bucket=BUCKET // 2)
    with pytest.raises(SyncError, match="plan different transfers"):
        Sender(group, make_plan(PARAMETERS, BUCKET, group.layout(0))).push(hold(make_weights(0)), 1)
    assert "plan different transfers" in fleet.peers[0].answer()["message"]


def test_members_that_do_not_come_are_named(fleet):
    fleet.hire(1)
    peer = fleet.peers[0]
    where = {"name": "late", "world": 4, "actors": 1, "host": "127.0.0.1", "port": fleet.store.port, "timeout_s": 4.0}
    peer.tell("join", rank=2, label="rollout 1", **where)
    with pytest.raises(SyncError, match=rf"rank \[1, 3\] of 4 did not come within 4 s.*rollout 1 on .*pid {peer.pid}"):
        join(Membership(rank=0, label="actor 0", **where))
    assert "[1, 3]" in peer.answer()["message"]
    with pytest.raises(SyncError, match=r"rank 0 of group late is taken already by actor 0"):
        join(Membership(rank=0, label="actor 0 again", **where))


def test_an_abort_ends_the_wait_for_members(fleet):
    group = SyncGroup(Membership("unwanted", 0, 2, 1, "127.0.0.1", fleet.store.port, timeout_s=HANG_S))
    threading.Timer(0.3, lambda: group.abort("no longer wanted")).start()
    with pytest.raises(SyncError, match="no longer wanted"):
        group.open()


@pytest.mark.slow
def test_a_store_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(SyncError, match=rf"cannot reach the weight sync store at 127.0.0.1:{port} within 1 s"):
        join(Membership("g", 1, 2, 1, "127.0.0.1", port, timeout_s=1.0))


def test_interfaces():
    assert interface_of("127.0.0.1") == "lo"
    assert address_of("lo", "sync.interface") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"sync.interface: .* no interface 'ib7' .*it has .*lo"):
        SyncGroup(Membership("g", 0, 2, 1, "127.0.0.1", 1, timeout_s=1, interface="ib7"))
    with pytest.raises(ConfigError, match="valid: auto, gloo, nccl"):
        SyncGroup(Membership("g", 0, 2, 1, "127.0.0.1", 1, timeout_s=1, backend="mpi"))


def test_gloo_reports_a_timeout_an_abort_and_a_death(fleet):
    """Failures are reported as `Transport` promises."""
    data: GlooTransport = fleet.build(1, timeout_s=SHORT_S).control
    back = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(TransportFailure) as caught:
        data.receive(back, 1, 9).wait()
    assert not caught.value.peer_left

    data = fleet.build(1).control
    pending = data.receive(back, 1, 9)
    threading.Timer(0.3, data.abort).start()
    with pytest.raises(TransportFailure):
        pending.wait()

    data = fleet.build(1).control
    pending = data.receive(back, 1, 9)
    dying = fleet.peers.pop()
    os.kill(dying.pid, signal.SIGKILL)
    with pytest.raises(TransportFailure) as caught:
        pending.wait()
    assert caught.value.peer_left
    data.close()
    dying.end()


# --- matrix -----------------------------------------------------------------------------------------------------------


AXES = (("qwen2", "qwen3", "llama"), (True, False), (1, 2), (2, 3), ("fp32", "bf16"))
PAIRWISE = (
    Cell("qwen2", True, 2, 3, "fp32"),
    Cell("qwen2", False, 1, 2, "bf16"),
    Cell("qwen3", True, 1, 2, "fp32"),
    Cell("qwen3", False, 2, 3, "bf16"),
    Cell("llama", True, 2, 2, "bf16"),
    Cell("llama", False, 1, 3, "fp32"),
)
BOUNDS = {"fp32": 1e-5, "bf16": 0.15}
"""Bound of a log-prob's difference; bf16 has 8 bits of mantissa, in every layer."""


def check(cell: Cell, place: Path) -> None:
    found = updates(cell, place)
    assert len(found) == 2
    for current, stale in found:
        assert current < BOUNDS[cell.dtype]
        assert stale > 5 * BOUNDS[cell.dtype]


def test_every_pair_of_values_is_covered() -> None:
    cells = [(c.arch, c.tied, c.tp, c.zero, c.dtype) for c in PAIRWISE]
    for (i, first), (j, second) in combinations(enumerate(AXES), 2):
        for pair in product(first, second):
            assert any((cell[i], cell[j]) == pair for cell in cells), pair


@pytest.mark.parametrize("cell", PAIRWISE, ids=str)
def test_the_engine_has_the_actors_weights(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("cell", [Cell(*values) for values in product(*AXES)], ids=str)
def test_the_engine_has_the_actors_weights_in_every_case(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)

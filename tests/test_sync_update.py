"""Whole updates between processes: the pytest process is the actor's rank 0, receivers have processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
import torch
from sync_peer import Peer, digest

from slurm_rlhf.errors import ConfigError, SyncError
from slurm_rlhf.sync.group import SyncGroup, join
from slurm_rlhf.sync.interface import address_of, interface_of
from slurm_rlhf.sync.nccl import nccl_available
from slurm_rlhf.sync.push import Sender, described
from slurm_rlhf.sync.receive import Receiver
from slurm_rlhf.sync.store import SyncStore
from slurm_rlhf.sync.transport import TransportFailure

pytestmark = pytest.mark.timeout(120)
BUCKET = 1 << 20


def _weights(seed: int, layers: int = 12) -> list[tuple[str, torch.Tensor]]:
    """About 12 MB in 12 buckets; fp32, bf16 and fp16; a tied head."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(512, 256, generator=generator)
    weights = [("embed", embed)]
    for layer in range(layers):
        weights.append((f"{layer}.weight", torch.randn(500, 501, generator=generator)))
        weights.append((f"{layer}.half", torch.randn(77, generator=generator).bfloat16()))
        weights.append((f"{layer}.other", torch.randn(3, 5, generator=generator).half()))
    return [*weights, ("head", embed)]


class Fleet:
    """The sender's side, receivers that come and go, and one store for all groups that follow each other.

    Receivers that a test leaves alive serve the next one: whatever happened to their group, they join another.
    """

    def __init__(self) -> None:
        self.store = SyncStore.listen("127.0.0.1", timeout_s=30)
        self.peers: list[Peer] = []
        self.spare: list[Peer] = []
        self.names = 0
        self.group: SyncGroup

    def hire(self, receivers: int) -> None:
        missing = receivers - len(self.peers) - len(self.spare)
        fresh = [Peer() for _ in range(missing)]
        self.spare += fresh
        for peer in fresh:
            peer.wait_warm()
        while len(self.peers) < receivers:
            self.peers.append(self.spare.pop(0))

    def dismiss(self) -> None:
        for peer in self.peers:
            if peer.fit():
                self.spare.append(peer)
            else:
                peer.end()
        self.peers = []

    def build(self, receivers: int, *, timeout_s: float = 30.0, backend: str = "auto") -> SyncGroup:
        self.hire(receivers)
        self.names += 1
        where = {"name": f"g{self.names}", "world": receivers + 1, "host": "127.0.0.1", "port": self.store.port}
        where |= {"timeout_s": timeout_s, "backend": backend}
        for rank, peer in enumerate(self.peers, 1):
            peer.tell("join", rank=rank, label=f"rollout {rank - 1}", **where)
        self.group = join(rank=0, label="actor 0", **where)
        for peer in self.peers:
            assert peer.answer() == [str(member) for member in self.group.members]
        return self.group

    def sender(self, receivers: int, weights: list[tuple[str, torch.Tensor]], **options: float) -> Sender:
        sender = Sender(self.build(receivers, **options), described(weights), BUCKET)
        for peer in self.peers:
            peer.tell("receiver_of")
        for peer in self.peers:
            assert peer.answer() == len(sender.plan.buckets)
        return sender

    def update(self, sender: Sender, weights: list[tuple[str, torch.Tensor]], version: int) -> None:
        """One update of all, compared byte for byte."""
        for peer in self.peers:
            peer.tell("update", version=version)
        stats = sender.push(weights, version)
        assert stats.version == version
        assert stats.buckets == len(sender.plan.buckets)
        sent = {name: digest(tensor) for name, tensor in weights if name != "head"}
        for peer in self.peers:
            assert peer.answer() == sent

    def end(self) -> None:
        for peer in self.peers + self.spare:
            peer.end()


@pytest.fixture(scope="module")
def receivers():
    made = Fleet()
    yield made
    made.end()


@pytest.fixture
def fleet(receivers):
    yield receivers
    receivers.dismiss()


def test_every_receiver_holds_what_was_sent_version_by_version(fleet):
    sender = fleet.sender(2, _weights(0))
    assert len(sender.plan.buckets) > 5
    for version in (1, 2, 7):
        fleet.update(sender, _weights(version), version)
    sender.group.close()
    for peer in fleet.peers:  # a peer that leaves in peace, too
        peer.tell("leave")
        assert peer.answer() is None
    with pytest.raises(SyncError, match="has ended: it was closed"):
        sender.push(_weights(8), 8)


def test_a_receiver_killed_half_way_is_named_and_the_survivors_go_on(fleet):
    weights = _weights(0)
    sender = fleet.sender(3, weights)
    first, dying, last = fleet.peers
    for peer in (first, last):
        peer.tell("update", version=1)
    dying.tell("update", version=1, at=15, act="die")
    start = time.monotonic()
    with pytest.raises(SyncError) as caught:
        sender.push(weights, 1)
    assert time.monotonic() - start < 8
    assert f"rollout 1 on {socket.gethostname()} (pid {dying.pid}) died" in str(caught.value)
    assert "rollout 0" not in str(caught.value)
    assert "rollout 2" not in str(caught.value)
    for peer in (first, last):
        answer = peer.answer()
        assert answer["error"] == "SyncError"
        assert f"rollout 1 on {socket.gethostname()} (pid {dying.pid}) died" in answer["message"]
    with pytest.raises(SyncError, match="has ended"):
        sender.push(weights, 2)

    fleet.peers.remove(dying)
    dying.end()
    fleet.update(fleet.sender(2, weights), _weights(5), 2)


def test_a_receiver_that_hangs_is_named_after_the_timeout(fleet):
    weights = _weights(0, layers=40)
    sender = fleet.sender(2, weights, timeout_s=3.0)
    hanging, fine = fleet.peers
    hanging.tell("update", version=1, at=3, act="freeze")
    fine.tell("update", version=1)
    start = time.monotonic()
    with pytest.raises(SyncError, match=r"no answer from rollout 0 on .* within 3 s \(timeout.sync\)") as caught:
        sender.push(weights, 1)
    assert 2.5 < time.monotonic() - start < 10
    assert "rollout 1" not in str(caught.value)
    assert "rollout 0" in fine.answer()["message"]
    fleet.peers.remove(hanging)
    hanging.end()


@pytest.mark.parametrize(
    "act, expected",
    [("raise", "rollout 1 on .*: ValueError: no room for this layer"), ("abort", "rollout 1 .*told by the conductor")],
)
def test_the_sender_learns_why_a_receiver_gave_up(fleet, act, expected):
    weights = _weights(0)
    sender = fleet.sender(2, weights)
    fine, failing = fleet.peers
    fine.tell("update", version=1)
    failing.tell("update", version=1, at=4, act=act, seconds=0.1)
    with pytest.raises(SyncError, match=expected):
        sender.push(weights, 1)
    assert failing.answer()["error"] == ("ValueError" if act == "raise" else "SyncError")
    assert "rollout 1" in fine.answer()["message"]


def test_receivers_learn_why_the_sender_gave_up(fleet):
    weights = _weights(0)
    sender = fleet.sender(2, weights)
    for peer in fleet.peers:
        peer.tell("update", version=1)
    with pytest.raises(SyncError, match=r"next parameter is 3\.other .* the plan says 3\.half"):
        sender.push([pair for pair in weights if pair[0] != "3.half"], 1)
    for peer in fleet.peers:
        assert "the plan says 3.half" in peer.answer()["message"]


def test_a_sender_that_dies_is_named(fleet):
    fleet.hire(1)
    sender = fleet.peers.pop()
    sender.tell("listen")
    where = {"name": "g", "world": 2, "host": "127.0.0.1", "port": sender.answer(), "timeout_s": 30}
    sender.tell("join", rank=0, label="actor 0", **where)
    group = join(rank=1, label="rollout 0", **where)
    sender.answer()
    sender.tell("push", version=1, seconds=0.2)
    receiver = Receiver(group)
    arrived = []

    def load():
        with receiver.update(1) as weights:
            for name, _ in weights:
                arrived.append(name)
                if len(arrived) == 3:
                    sender.end()

    start = time.monotonic()
    with pytest.raises(SyncError, match=rf"actor 0 on .*pid {sender.pid}\), which sends them, is gone or hangs"):
        load()
    assert arrived == ["p0", "p1", "p2"]
    assert time.monotonic() - start < 8


def test_bytes_changed_on_the_way_are_named_on_both_ends(fleet):
    weights = _weights(0)
    sender = fleet.sender(2, weights)
    transport, send = sender.group.data, sender.group.data.broadcast
    calls = 0

    def damaging(buffer: torch.Tensor, root: int):
        nonlocal calls
        calls += 1
        if calls == 3:
            entry = next(e for e in sender.plan.buckets[2].entries if e.name.endswith("weight"))
            buffer[entry.offset + 1000] ^= 16
        return send(buffer, root)

    transport.broadcast = damaging
    damaged = next(e.name for e in sender.plan.buckets[2].entries if e.name.endswith("weight"))
    for peer in fleet.peers:
        peer.tell("update", version=4)
    with pytest.raises(SyncError, match=f"checksum of policy version 4 differs from the sender's in {damaged} "):
        sender.push(weights, 4)
    for peer in fleet.peers:
        assert damaged in peer.answer()["message"]


def test_versions_have_to_agree_and_engines_to_read_everything(fleet):
    weights = _weights(0)
    sender = fleet.sender(2, weights)
    fleet.peers[0].tell("update", version=1)
    fleet.peers[1].tell("update", version=2)
    with pytest.raises(
        SyncError, match=r"rollout 1 .*expected bucket 0 of policy version 2, got bucket 0 of version 1"
    ):
        sender.push(weights, 1)
    for peer in fleet.peers:
        peer.answer()
    sender = fleet.sender(2, weights)
    fleet.peers[0].tell("update", version=1)
    fleet.peers[1].tell("update", version=1, at=35, act="leave")
    with pytest.raises(SyncError, match=r"rollout 1 .*the engine left 1 of the 37 parameters unread"):
        sender.push(weights, 1)
    for peer in fleet.peers:
        peer.answer()


def test_an_abort_from_another_thread_wakes_everybody(fleet):
    weights = _weights(0, layers=40)
    sender = fleet.sender(2, weights)
    for peer in fleet.peers:
        peer.tell("update", version=1, seconds=0.1)
    threading.Timer(0.5, lambda: sender.group.abort("the conductor ends the run")).start()
    start = time.monotonic()
    with pytest.raises(SyncError, match="the conductor ends the run"):
        sender.push(weights, 1)
    assert time.monotonic() - start < 4
    for peer in fleet.peers:
        assert "the conductor ends the run" in peer.answer()["message"]


def test_another_architecture_names_both_ends(fleet):
    weights = _weights(0)
    sender = Sender(fleet.build(2), described(weights), BUCKET)
    expected = described(weights)
    fleet.peers[0].tell("receiver_of", expected=expected)
    fleet.peers[1].tell("receiver_of", expected=[*expected[:-1], ["11.other", [5, 3], "fp16"]])
    assert fleet.peers[0].answer() == len(sender.plan.buckets)
    assert "11.other: [3, 5] at actor 0 on" in fleet.peers[1].answer()["message"]
    with pytest.raises(
        SyncError, match=r"(?s)rollout 1 on .*11.other: \[3, 5\] at actor 0 on .* \[5, 3\] at rollout 1"
    ):
        sender.push(weights, 1)


def test_members_that_do_not_come_are_named(fleet):
    fleet.hire(1)
    peer = fleet.peers[0]
    where = {"name": "late", "world": 4, "host": "127.0.0.1", "port": fleet.store.port, "timeout_s": 4.0}
    peer.tell("join", rank=2, label="rollout 1", **where)
    with pytest.raises(SyncError, match=rf"rank \[1, 3\] of 4 did not come within 4 s.*rollout 1 on .*pid {peer.pid}"):
        join(rank=0, label="actor 0", **where)
    assert "[1, 3]" in peer.answer()["message"]
    with pytest.raises(SyncError, match=r"rank 0 of group late is taken already by actor 0"):
        join(rank=0, label="actor 0 again", **where)


def test_an_abort_ends_the_wait_for_members(fleet):
    group = SyncGroup("unwanted", 0, 2, "127.0.0.1", fleet.store.port, timeout_s=60)
    threading.Timer(0.3, lambda: group.abort("no longer wanted")).start()
    start = time.monotonic()
    with pytest.raises(SyncError, match="no longer wanted"):
        group.open()
    assert time.monotonic() - start < 3


def test_a_store_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(SyncError, match=rf"cannot reach the weight sync store at 127.0.0.1:{port} within 1 s"):
        join("g", 1, 2, "127.0.0.1", port, timeout_s=1.0)


def test_interfaces():
    assert interface_of("127.0.0.1") == "lo"
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"sync.interface: .* no interface 'ib7' .*it has .*lo"):
        SyncGroup("g", 0, 2, "127.0.0.1", 1, timeout_s=1, interface="ib7")
    with pytest.raises(ConfigError, match="valid: auto, gloo, nccl"):
        SyncGroup("g", 0, 2, "127.0.0.1", 1, timeout_s=1, backend="mpi")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_transport_conformance(fleet, backend):
    """What `Transport` promises, of every implementation."""
    if backend == "nccl" and not nccl_available():
        with pytest.raises(ConfigError, match="nccl needs a GPU"):
            fleet.build(1, backend=backend)
        return
    data = fleet.build(1, timeout_s=3.0, backend=backend).data
    fleet.peers[0].tell("operations")
    data.broadcast(torch.full((1000,), 3, dtype=torch.uint8, device=data.device), 0).wait()
    data.send(torch.full((1000,), 4, dtype=torch.uint8, device=data.device), 1, 7).wait()
    back = torch.zeros(1000, dtype=torch.uint8, device=data.device)
    data.receive(back, 1, 8).wait()
    assert fleet.peers[0].answer() == [3.0, 4.0]
    assert back.unique().tolist() == [7]

    start = time.monotonic()
    with pytest.raises(TransportFailure) as caught:
        data.receive(back, 1, 9).wait()
    assert 2.5 < time.monotonic() - start < 6
    assert not caught.value.peer_left

    data = fleet.build(1, backend=backend).data
    pending = data.receive(back, 1, 9)
    threading.Timer(0.3, data.abort).start()
    start = time.monotonic()
    with pytest.raises(TransportFailure):
        pending.wait()
    assert time.monotonic() - start < 3

    data = fleet.build(1, backend=backend).data
    pending = data.receive(back, 1, 9)
    dying = fleet.peers.pop()
    os.kill(dying.pid, signal.SIGKILL)
    with pytest.raises(TransportFailure) as caught:
        pending.wait()
    assert caught.value.peer_left
    data.close()
    dying.end()

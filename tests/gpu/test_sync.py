"""Weights between GPUs, by NCCL and by memory that two processes share: the code as it is, on stand-ins for GPUs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_nccl import held_back
from gpu_standins import FakeCuda, fake_cuda
from sync_fleet import BUCKET, Fleet, PeerRanks, conducted, loaded, one_of, sent
from sync_peer import describe, hold, make_weights
from torch.distributed import HashStore
from waiting import HANG_S

import slurm_rlhf.weights.ends as push_module
from slurm_rlhf.bench import sync as bench_sync
from slurm_rlhf.cli.main import main
from slurm_rlhf.config.schema import Sync
from slurm_rlhf.errors import ConfigError, SyncBroken, SyncError
from slurm_rlhf.polling import wait_until
from slurm_rlhf.process_groups._torch import OWN_ERRORS
from slurm_rlhf.weights.backends import TransportFailure
from slurm_rlhf.weights.backends.device_ipc import DeviceIpc
from slurm_rlhf.weights.backends.nccl import Nccl, NcclCommunicator, in_time, name_interface
from slurm_rlhf.weights.group import SyncGroup
from slurm_rlhf.weights.lead import WeightSync
from slurm_rlhf.weights.rendezvous import Membership, device_name
from slurm_rlhf.weights.transfer_plan import DEPTH

pytestmark = [pytest.mark.usefixtures("own_environment")]
MARKS_OF_FIXTURES = {"fleet": "slow"}

OWN = "abcdefgh"
"""A GPU for each rank."""


@pytest.fixture(scope="module")
def all_peers():
    made = Fleet()
    yield made
    made.end(gently=True)


@pytest.fixture
def cuda():
    """Stand-ins whose GPU is not the first, and has another number for an engine rank: a wrong number is noticed."""
    with fake_cuda(one_of("a", 1)["gpus"]) as fake:
        torch.cuda.set_device(1)
        yield fake


@pytest.fixture
def fleet(all_peers: Fleet, cuda: FakeCuda):
    yield all_peers
    all_peers.dismiss()


def seen(fleet: Fleet) -> list[dict[str, Any]]:
    for peer in fleet.peers:
        peer.tell("seen")
    return [peer.answer() for peer in fleet.peers]


def groups() -> list[Any]:
    return torch.distributed.ProcessGroupNCCL.made


def test_shards_over_nccl(fleet: Fleet, cuda: FakeCuda):
    """Bytes of two updates, to two engine ranks of different nodes from two actor ranks that hold shards."""
    sender = fleet.sender(2, actors=2, zero=3, gpus=OWN, nodes="abab")
    assert (sender.group.backend, type(sender.backend)) == ("nccl", Nccl)
    # Both communicators stand before the first update, at every rank (defect 11).
    assert [group._is_initialized() for group in groups()] == [True]
    assert [rank["connected"] for rank in seen(fleet)] == [[True], [True, True], [True, True]]
    for version in (1, 2):
        fleet.update(sender, version)
    buckets = len(sender.plan.buckets)
    assert buckets > 10
    for rank in seen(fleet)[1:]:
        # The host waits for the GPU once a bucket and at the end (defect 10). `to`: the test reads back what came, and
        # the checksum's weights go to the GPU once.
        syncs = rank["syncs"]
        assert syncs.pop("to") <= 2 * len(sender.plan.parameters) + 4
        assert syncs == {"tolist": 2 * buckets, "stream.synchronize": 2}
    assert not cuda.syncs["tolist"], "the sender reads nothing back"
    assert cuda.syncs["stream.synchronize"] == 2
    assert 0 < sender.peak < 3 * BUCKET


def test_one_engine_rank_takes_whole_models(fleet: Fleet):
    sender = fleet.sender(1, actors=2, gpus=OWN)
    assert groups()[-1].size() == 3
    fleet.update(sender, 1)
    (_, engine) = seen(fleet)
    assert engine["sizes"] == [3], "no communicator for one rank alone"
    assert 0.9 * sender.plan.payload < engine["peak"] < sender.plan.payload + 4 * BUCKET, "the peer keeps what came"


def test_a_bucket_comes_in_while_the_one_before_is_loaded(fleet: Fleet, tmp_path: Path, monkeypatch):
    """Bucket 1 is sent when the engine has loaded of bucket 0, and not before (defect 10)."""
    sender = fleet.sender(1, gpus=OWN)
    (engine,) = fleet.peers
    engine.tell("update", version=1, act="tell", at=0, path=str(tmp_path / "loaded"))
    fill, waited = push_module.fill, []

    def fill_later(buffer, part, bucket, *args):
        if bucket == 1:
            waited.append(wait_until((tmp_path / "loaded").exists, HANG_S))
        fill(buffer, part, bucket, *args)

    monkeypatch.setattr(push_module, "fill", fill_later)
    sender.push(hold(make_weights(1)), 1)
    assert waited == [True]
    assert "error" not in engine.answer()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_in_the_middle_takes_nobody_with_it(fleet: Fleet, victim: int):
    """Actor or engine rank: the survivors' processes live on, form a new group, and the next update is right."""
    sender = fleet.sender(2, actors=2, zero=3, gpus=OWN)
    slow, first, second = fleet.peers
    dying = fleet.peers[victim]
    slow.tell("push", version=4, seed=4, seconds=0.3)  # it sleeps while its group is aborted
    for peer in (first, second):
        peer.tell("update", version=4, **({"at": 9, "act": "die"} if peer is dying else {}))
    if dying is slow:
        threading.Timer(0.3, dying.process.kill).start()
    with pytest.raises(SyncBroken, match=rf"pid {dying.pid}\) died"):
        sender.push(hold(make_weights(4), 0, 2), 4)
    for peer in fleet.peers:
        if peer is not dying:
            answer = peer.answer()
            assert (answer["error"], f"pid {dying.pid}" in answer["message"]) == ("SyncBroken", True)
            assert peer.process.poll() is None
    dying.end()
    fleet.peers.remove(dying)
    sender = fleet.sender(1, actors=2, zero=3, gpus=OWN)
    fleet.update(sender, 5)


def test_an_abort_wakes_who_waits(fleet: Fleet):
    sender = fleet.sender(1, actors=2, zero=3, gpus=OWN)
    threading.Timer(0.3, sender.group.abort, ("the conductor ends the run",)).start()
    fleet.peers[1].tell("update", version=1)
    with pytest.raises(SyncError, match="the conductor ends the run"):
        sender.push(hold(make_weights(1), 0, 2), 1)  # the other actor rank never sends
    answer = fleet.peers[1].answer()
    # Whose verdict it hears depends on how soon the leader's thread runs.
    assert answer["error"] in ("SyncError", "SyncBroken")
    assert "checksum" not in answer["message"], "what an abort completed was taken for weights"


def test_a_link_error_says_what_nccl_said(fleet: Fleet):
    """All members live, so that only the library knows what happened; a new group may help."""
    sender = fleet.sender(1, gpus=OWN)
    (engine,) = fleet.peers
    engine.tell("break_link", times=1)
    engine.answer()
    engine.tell("update", version=1)
    with pytest.raises(SyncBroken, match=r"all of them are alive: NCCL: .*network error"):
        sender.push(hold(make_weights(1)), 1)
    assert engine.answer()["error"] == "SyncBroken"
    fleet.update(fleet.sender(1, gpus=OWN), 2)


@pytest.mark.parametrize("zero", [0, 3])
def test_roles_that_share_gpus(fleet: Fleet, zero: int):
    """colocate_all on two nodes: whole models go from process to process on a GPU, shards are gathered over NCCL."""
    sender = fleet.sender(2, actors=2, zero=zero, gpus="abab", nodes="abab", colocated=True, whole=zero == 0)
    assert (sender.group.backend, type(sender.backend)) == ("ipc", DeviceIpc)
    gathering = [2] if zero == 3 else []
    assert [group.size() for group in groups()] == gathering
    for version in (1, 2):
        fleet.update(sender, version)
    actor, *engines = seen(fleet)
    assert (actor["sizes"], actor["mapped"]) == (gathering, [])
    for rank, gpu in zip(engines, "ab", strict=True):
        # Memory of its own GPU alone: no context on another (defect 9).
        assert rank["mapped"] == [[f"GPU-{gpu}", f"GPU-{gpu}"]] * DEPTH
        assert (rank["sizes"], rank["syncs"]["tolist"]) == ([], 2 * len(sender.plan.buckets))
    buckets = range(len(sender.plan.buckets))
    assert sender.peak >= DEPTH * max(sender.plan.nbytes(bucket, 0) for bucket in buckets), "its slots count"


def test_an_actor_rank_whose_gpu_has_no_engine(fleet: Fleet):
    """The rank gives its shard and hands over nothing. It has no part of some buckets, and helps to gather them."""
    sender = fleet.sender(1, actors=2, zero=3, gpus="aba", colocated=True, bucket=BUCKET // 4, layers=3)
    assert sender.group.backend == "ipc"
    parts = [[part.owner for part in sender.plan.parts(number, 0)] for number in range(len(sender.plan.buckets))]
    assert [0] in parts
    assert [1] in parts
    fleet.update(sender, 1, layers=3)
    sender.group.close()
    with pytest.raises(TransportFailure, match="given up"):
        sender.backend._until(Never())
    sender = fleet.sender(1, actors=2, zero=0, gpus="aba", colocated=True, whole=True)
    fleet.update(sender, 2)


def test_two_actor_ranks_on_the_gpu_of_an_engine(fleet: Fleet):
    """Each hands over its parts of whole models. (NCCL would refuse to gather shards between them, and say so.)"""
    sender = fleet.sender(1, actors=2, gpus="aaa", backend="ipc", whole=True)
    assert len(sender.plan.parts(0, 0)) == 2
    fleet.update(sender, 1)
    with pytest.raises(SyncError, match="Duplicate GPU"):
        fleet.sender(1, actors=2, zero=3, gpus="aaa", backend="ipc", timeout_s=HANG_S)


def test_a_death_between_roles_that_share_gpus(fleet: Fleet):
    sender = fleet.sender(2, actors=2, zero=3, gpus="abab", colocated=True)
    other, first, second = fleet.peers
    other.tell("push", version=1, seed=1)
    first.tell("update", version=1, at=9, act="die")
    second.tell("update", version=1)
    with pytest.raises(SyncBroken, match=rf"pid {first.pid}\) died"):
        sender.push(hold(make_weights(1), 0, 2), 1)
    assert [peer.answer()["error"] for peer in (other, second)] == ["SyncBroken"] * 2
    first.end()
    fleet.peers.remove(first)
    fleet.update(fleet.sender(1, actors=2, zero=3, gpus="aba", colocated=True), 2)


def test_a_bucket_that_is_announced_before_it_is_filled(fleet: Fleet, monkeypatch):
    """The stand-ins see across processes what one GPU would do: an engine reads where the actor still writes."""
    sender = fleet.sender(1, gpus="aa", colocated=True, whole=True)
    monkeypatch.setattr(DeviceIpc, "_until", lambda self, event: None)
    fleet.peers[0].tell("update", version=1)
    with pytest.raises(SyncError, match=rf"reads memory of a GPU where process {os.getpid()} still writes"):
        sender.push(hold(make_weights(1)), 1)
    assert fleet.peers[0].answer()["error"] == "StreamRace"


def connected(fleet: Fleet, **settings: Any) -> WeightSync:
    """Two actor ranks and an engine, with a GPU each."""
    fleet.hire(3)
    for peer, gpu in zip(fleet.peers, "abc", strict=True):
        peer.tell("see", **one_of(gpu))
        assert peer.answer() is None
    weights = conducted((PeerRanks(fleet.peers[:2]), PeerRanks(fleet.peers[2:])), **({"timeout.sync": 40.0} | settings))
    weights.connect(describe(make_weights(0)), [0])
    return weights


def test_the_conductor_repeats_an_update_whose_link_broke(fleet: Fleet):
    weights = connected(fleet)
    assert weights.update(1)["perf/sync_group"] == 1
    weights.rollout.tell(0, "break_link", times=1)
    assert weights.update(2)["perf/sync_group"] == 2, "once more over a new group, of NCCL again"
    assert loaded(weights, 0) == sent(2)
    assert all(peer.process.poll() is None for peer in fleet.peers)


def test_the_conductor_goes_over_to_the_fallback(fleet: Fleet):
    """NCCL keeps failing, whatever it says: defect 1 would have run on over gloo."""
    weights = connected(fleet, **{"sync.fallback": "gloo"})
    weights.rollout.tell(0, "break_link", times=9)
    weights.update(1)
    assert weights.connection.backend == "gloo"
    assert loaded(weights, 0) == sent(1)


# The tests below need no transfer.


def test_buckets_are_larger_between_gpus():
    assert [Sync(bucket_mb=mb).bucket_size_mb(gpus) for mb, gpus in ((0, True), (0, False), (5, True))] == [256, 64, 5]


class Never:
    """An operation, or an event, that is never over."""

    def is_completed(self) -> bool:
        return False

    def query(self) -> bool:
        return False


def group_of_one(timeout_s: float = 5.0) -> NcclCommunicator:
    return NcclCommunicator(HashStore(), 0, 1, timeout_s)


def test_a_group_has_no_watchdog_and_leaves_the_environment_alone(cuda: FakeCuda, monkeypatch):
    """A watchdog that sees an error ends the process, whatever else is set (defect 3)."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    before = dict(os.environ)
    group_of_one()
    assert dict(os.environ) == before
    assert groups()[-1]._blocking
    assert "TORCH_NCCL_BLOCKING_WAIT" in OWN_ERRORS


def test_defect_1_put_back_fails_here(cuda: FakeCuda):
    """A ProcessGroup's coalescing takes the device, a bare ProcessGroupNCCL's does not."""
    made = group_of_one()
    group = made._group
    made._group = type("Old", (), {"_start_coalescing": lambda self: group._start_coalescing("cuda")})()
    with pytest.raises(TransportFailure, match="NCCL: _start_coalescing"):
        made.exchange([], [])


def test_an_exchange_that_fails_is_not_left_open(cuda: FakeCuda):
    """NCCL would hold back all that this thread asks for later, and call it completed."""
    made = group_of_one()
    made.abort()
    with pytest.raises(TransportFailure, match="aborted"):
        made.exchange([(torch.zeros(8, dtype=torch.uint8, device="cuda"), 1)], [])
    assert held_back() == 0


def test_nothing_to_exchange(cuda: FakeCuda):
    assert group_of_one().exchange([], []) == []


def test_what_is_never_over_ends_with_the_time_out(cuda: FakeCuda):
    made = group_of_one(0.2)

    with pytest.raises(TransportFailure, match=r"not done after 0.2 s"):
        made.settle([Never()])
    made.abort()
    made.abort()
    with pytest.raises(TransportFailure, match="the transfer was given up"):
        made.settle([Never()])
    with pytest.raises(TransportFailure, match=r"did not connect the members within 0.1 s"):
        in_time(lambda: time.sleep(1), 0.1)


def test_two_ranks_on_one_gpu_are_refused_in_words(fleet: Fleet):
    with pytest.raises(SyncError, match="Duplicate GPU"):
        fleet.sender(1, gpus="aa", backend="nccl", timeout_s=HANG_S)


def test_an_address_is_no_interface(monkeypatch, cuda: FakeCuda):
    """A member on an alias knows its address only (defect 12)."""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    name_interface("10.1.2.3")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    name_interface("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    group_of_one().meet(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    name_interface("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "the user's word counts"


def test_the_benchmark_of_transfers_knows_the_gpus(monkeypatch):
    monkeypatch.setattr(bench_sync, "local_gpus", lambda environ: ("0", "1"))
    asked = []
    monkeypatch.setattr(bench_sync, "measure", lambda spec, gpus: asked.append((gpus, spec.bucket_bytes)))
    monkeypatch.setattr(bench_sync, "show", lambda result: "")
    for backend in ("nccl", "gloo"):
        assert main(["bench", "sync", f"--backend={backend}", "--size=1MB"]) == 0
    assert asked == [(("0", "1"), 256 << 20), ((), 64 << 20)]


def test_the_gpu_of_a_rank(cuda: FakeCuda):
    assert device_name() == "GPU-a"


def test_a_rank_without_a_gpu():
    assert device_name() == ""
    with pytest.raises(ConfigError, match="nccl needs a GPU and a torch that has NCCL"):
        SyncGroup(Membership("g", 0, 2, 1, "127.0.0.1", 1, 1.0, backend="nccl"))

"""Promises of the seam `Carrier`, kept by every backend behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sync_conformance import conform

from slurm_rlhf.errors import ConfigError, SyncError
from slurm_rlhf.weights.backends.device_ipc import ordinal_of
from slurm_rlhf.weights.rendezvous import choose, share_gpus

MARKS_OF_FIXTURES = {"fleet": "slow"}

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: NCCL moves bytes between GPUs")
BACKENDS = ["gloo", "ipc", "disk", pytest.param("nccl", marks=NEEDS_GPU)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_conformance(fleet, tmp_path: Path, backend: str):
    conform(fleet, tmp_path, backend)


def test_shared_memory_has_no_name_any_more_when_it_is_used(fleet):
    before = set(Path("/dev/shm").glob("slurm_rlhf.sync.*"))
    fleet.sender(2, nodes="nnn")
    assert set(Path("/dev/shm").glob("slurm_rlhf.sync.*")) <= before


@pytest.mark.parametrize(
    ("wanted", "nodes", "devices", "backend"),
    [
        ("auto", "nn", ["", ""], "gloo"),
        ("auto", "ab", ["g", ""], "gloo"),
        ("auto", "ab", ["g", "h"], "nccl"),
        ("auto", "nn", ["g", "g"], "ipc"),
        ("auto", "nnm", ["g", "g", "h"], "gloo"),
        ("disk", "ab", ["g", "h"], "disk"),
        ("ipc", "nn", ["", ""], "ipc"),
    ],
)
def test_the_choice(wanted, nodes, devices, backend):
    chosen, why = choose([wanted] * len(nodes), list(nodes), devices, shared_gpus=share_gpus(devices, 1))
    assert chosen == backend
    assert why
    assert ("whose GPU has no actor rank" in why) is (len(nodes) == 3)


def test_colocated_roles_choose_shared_memory_without_gpus_too():
    """One node is enough, or several if each has the whole model; where the user says otherwise, that counts."""
    chosen, why = choose(["auto"] * 2, ["n", "n"], ["", ""], colocated=True)
    assert (chosen, why) == ("ipc", "actor and engines share their slots (train.colocate_all)")
    assert choose(["auto"] * 4, list("nmnm"), [""] * 4, colocated=True)[0] == "gloo"
    assert choose(["auto"] * 4, list("nmnm"), [""] * 4, colocated=True, inside=True)[0] == "ipc"
    assert choose(["auto"] * 4, list("nmnm"), list("ghgh"), colocated=True, shared_gpus=True) == (
        "ipc",
        "each engine rank shares its GPU with an actor rank",
    )
    assert choose(["ipc"] * 4, list("nmnm"), list("ghgh"), shared_gpus=True)[0] == "ipc"
    assert [share_gpus(list(gpus), actors) for gpus, actors in (("ghgh", 2), ("ghk", 2))] == [True, False]
    assert not share_gpus(["g", ""], 1)
    assert choose(["gloo"] * 2, ["n", "n"], ["", ""], colocated=True)[0] == "gloo"


def test_colocated_roles_of_two_nodes_stay_inside_them(fleet):
    """Each actor rank holds the whole model; with shards in one place only, roles would have to leave their node."""
    sender = fleet.sender(2, actors=2, nodes="abab", colocated=True, whole=True)
    assert sender.group.backend == "ipc"
    assert [(stream.owners, stream.nodes) for stream in sender.plan.streams] == [((0,), ("a",)), ((1,), ("b",))]
    for version in (1, 2):
        fleet.update(sender, version)
    assert fleet.build(2, actors=2, nodes="abab", colocated=True).backend == "gloo"
    assert fleet.build(2, actors=2, nodes="abaa", colocated=True, whole=True).backend == "gloo"


def test_the_gpu_of_another_process_by_its_name():
    assert ordinal_of("GPU-b", ["GPU-a", "GPU-b"], "actor 0") == 1
    with pytest.raises(SyncError, match=r"of actor 3 are on GPU GPU-c, and this rank sees GPU-a only.*auto"):
        ordinal_of("GPU-c", ["GPU-a"], "actor 3")


def test_what_cannot_be_chosen():
    with pytest.raises(ConfigError, match="different backends: gloo, nccl"):
        choose(["gloo", "nccl"], ["a", "b"], ["", ""])
    with pytest.raises(ConfigError, match="ipc joins roles of one node, and these are on a, b"):
        choose(["ipc", "ipc"], ["a", "b"], ["", ""])
    with pytest.raises(ConfigError, match="engine ranks whose GPU has no actor rank"):
        choose(["ipc"] * 2, list("nn"), list("gh"))
    with pytest.raises(ConfigError, match="nccl needs a GPU"):
        choose(["nccl", "nccl"], ["a", "b"], ["g", ""])

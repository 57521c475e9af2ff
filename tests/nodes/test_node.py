"""Choices that a node makes for itself: devices, caches, networks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slurm_rlhf.cluster.network import address_towards, interface_of
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.environment import node_environment, visible_gpus
from slurm_rlhf.placement.topology import CPU, Node, Topology


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "1,2"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "5,6"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, "GPU-b,GPU-c"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "1,2"),
    ],
)
def test_slots_are_counted_among_what_slurm_granted(environ: dict[str, str], expected: str) -> None:
    gpus = visible_gpus(Topology.uniform(["n1"], 8), "n1", (1, 2), environ)
    assert gpus == {"CUDA_VISIBLE_DEVICES": expected}
    found = node_environment(environ, "actor", Path("logs"), Path("own"), gpus, "")
    assert found["CUDA_VISIBLE_DEVICES"] == expected


def test_devices_that_are_known_by_name_and_nodes_without_any() -> None:
    named = Topology((Node("n1", 2, 4, ("GPU-x", "GPU-y")),))
    assert visible_gpus(named, "n1", (1,), {})["CUDA_VISIBLE_DEVICES"] == "GPU-y"
    on_cpus = Topology((Node("n1", 4),), CPU)
    assert visible_gpus(on_cpus, "n1", (1,), {"CUDA_VISIBLE_DEVICES": "3"})["CUDA_VISIBLE_DEVICES"] == ""


def test_fewer_devices_in_the_step_than_the_map_uses() -> None:
    with pytest.raises(PlacementError, match="node n1: the rank map uses GPU 2, but the step was granted 2"):
        visible_gpus(Topology.uniform(["n1"], 8), "n1", (1, 2), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_the_way_to_this_machine_is_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


def test_a_node_without_an_address_is_named() -> None:
    with pytest.raises(PlacementError, match=rf"{socket.gethostname()} cannot reach node no-such-node.invalid"):
        address_towards("no-such-node.invalid")

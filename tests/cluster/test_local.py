"""One machine: process slots without GPUs, the real GPUs with them, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.cluster.gpu_query import local_gpus
from slurm_rlhf.cluster.resources import local_topology
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import role_sizes


def nvidia_smi(folder: Path, gpus: int, code: int = 0) -> dict[str, str]:
    """An environment whose PATH holds an nvidia-smi that lists `gpus` GPUs."""
    lines = "\n".join(
        f"GPU {i}: NVIDIA H200 (UUID: GPU-{i}{i})\n  MIG 1g.18gb Device 0: (UUID: MIG-{i})" for i in range(gpus)
    )
    (folder / "list").write_text(lines + "\n")
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {folder}/list\nexit {code}\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_without_gpus_a_slot_is_a_process(tmp_path: Path) -> None:
    config = Config()
    config.actor.num_gpus_per_node = 3
    config.vllm.num_engines = 2
    config.vllm.tensor_parallel_size = 2
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}  # a leftover: there is no GPU
    topology = local_topology(config, environ=environ)
    assert topology.accelerator == "cpu"
    assert [node.gpus for node in topology.nodes] == [3 + 1 + 1 + 4]
    assert place(topology, role_sizes(config)).worlds == {"actor": 3, "critic": 1, "reference": 1, "rollout": 4}
    config.algo.kl.init_coef = 0.0
    assert "reference" not in place(local_topology(config, environ=environ), role_sizes(config)).roles


def test_with_gpus_the_real_number(tmp_path: Path) -> None:
    environ = nvidia_smi(tmp_path, 8)
    topology = local_topology(Config(), environ={**environ, "CUDA_VISIBLE_DEVICES": "7,5,3,1"})
    assert topology.accelerator == "gpu"
    assert topology.nodes[0].gpus == 4
    assert topology.nodes[0].visible([1, 2]) == "5,3"


def test_fewer_gpus_than_needed(tmp_path: Path) -> None:
    config = Config()
    config.actor.num_gpus_per_node = 4
    with pytest.raises(PlacementError, match=r"(?s)need 7 GPUs.*actor.num_gpus_per_node = 4.*CUDA_VISIBLE_DEVICES="):
        local_topology(config, environ=nvidia_smi(tmp_path, 4))
    colocated = [frozenset(("actor", "reference"))]
    config.actor.num_gpus_per_node = 1
    assert local_topology(config, colocated, nvidia_smi(tmp_path, 3)).slots == 3


def test_several_nodes_outside_an_allocation(tmp_path: Path) -> None:
    config = Config()
    config.actor.num_nodes = 2
    config.vllm.num_nodes = 4
    config.vllm.num_engines = 4
    message = r"actor.num_nodes = 2, vllm.num_nodes = 4, but this is not a Slurm allocation.*sbatch --nodes=4"
    with pytest.raises(PlacementError, match=message):
        local_topology(config, environ={"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2", ("2",)),
        ("3, 0", ("3", "0")),
        ("1,9,2", ("1",)),  # CUDA hides what follows an index that does not exist
        ("1,1", ("1",)),
        ("GPU-11,MIG-2", ("GPU-11", "MIG-2")),
    ],
)
def test_cuda_visible_devices(tmp_path: Path, chosen: str | None, visible: tuple[str, ...]) -> None:
    environ = nvidia_smi(tmp_path, 4)
    if chosen is not None:
        environ["CUDA_VISIBLE_DEVICES"] = chosen
    assert local_gpus(environ) == visible


def test_the_drivers_directory_where_nvidia_smi_does_not_answer(tmp_path: Path) -> None:
    proc = tmp_path / "gpus"
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (proc / bus).mkdir(parents=True)
    assert local_gpus({"PATH": str(tmp_path)}, proc) == ("0", "1")
    assert local_gpus(nvidia_smi(tmp_path, 3, code=9), proc) == ("0", "1")
    assert local_gpus({"PATH": "/nonexistent"}, tmp_path / "missing") == ()

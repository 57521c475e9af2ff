"""Where the key cluster.spares counts: the layout, the job that is submitted, and MPI, which has none."""

from __future__ import annotations

import pytest

from slurm_rlhf.cli.plan import layout_here
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, PlacementError
from slurm_rlhf.nodes.mpi.assignment import Launched, Process, place_processes
from slurm_rlhf.nodes.submitit_job import slurm_parameters

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_GPUS_PER_NODE": "4",
    "SLURM_JOB_CPUS_PER_NODE": "8(x3)",
}


def config(spares: int) -> Config:
    config = Config(run_dir="/runs/a")
    config.cluster.spares = spares
    return config


def test_ranks_stay_off_the_last_nodes() -> None:
    assert {node.name for node in layout_here(config(0), JOB).topology.nodes} == {"n1", "n2", "n3"}
    assert [node.name for node in layout_here(config(1), JOB).topology.nodes] == ["n1", "n2"]
    assert [node.name for node in layout_here(config(1), JOB, ["n1", "n3"]).topology.nodes] == ["n1", "n3"]
    with pytest.raises(PlacementError, match=r"cluster.spares = 3, but the allocation has 3 nodes: n1, n2, n3"):
        layout_here(config(3), JOB)


def test_submit_asks_for_them() -> None:
    asked = config(2)
    asked.slurm.gpus_per_node = 4
    alone = config(0)
    alone.slurm.gpus_per_node = 4
    nodes = [slurm_parameters(each)["slurm_additional_parameters"]["nodes"] for each in (alone, asked)]
    assert nodes[1] == nodes[0] + 2
    asked.slurm.nodes = 5  # what the user says is the whole job
    assert slurm_parameters(asked)["slurm_additional_parameters"]["nodes"] == 5


def test_mpi_has_none() -> None:
    start = Launched("mpirun", "OMPI_COMM_WORLD_SIZE", 4, 0)
    with pytest.raises(
        ConfigError, match=r"cluster.spares does not work with mpirun: there every process holds a rank"
    ):
        place_processes(config(1), [Process("n1", (0,), ())] * 4, start)

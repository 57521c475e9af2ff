"""reward.workers_num_nodes and cluster.spares in the layout, the preflight, a step and a job that is submitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_rlhf.cli.plan import draw_layout, layout_here, layout_on
from slurm_rlhf.cluster.resources import nodes_here
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.examination import Evidence, Question, judge
from slurm_rlhf.nodes.facts import NodeFacts
from slurm_rlhf.nodes.needs import needs_of
from slurm_rlhf.nodes.srun import step_command, workers_step
from slurm_rlhf.nodes.submitit_job import slurm_parameters
from slurm_rlhf.placement.rank_map import RankMap, draw
from slurm_rlhf.placement.topology import Node, Topology

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_GPUS_PER_NODE": "4",
    "SLURM_JOB_CPUS_PER_NODE": "8(x4)",
}


def config(nodes: int, spares: int = 0) -> Config:
    config = Config(run_dir="/runs/a")
    config.reward.remote_url = "/shared/reward.py"
    config.reward.workers_num_nodes, config.cluster.spares = nodes, spares
    return config


def test_ranks_stay_off_the_last_nodes_and_off_spares_before_them() -> None:
    found = layout_here(config(1), JOB).topology
    assert ([node.name for node in found.nodes], found.workers) == (["n1", "n2", "n3"], ("n4",))
    found = layout_here(config(1, spares=1), JOB).topology
    assert ([node.name for node in found.nodes], found.workers) == (["n1", "n2"], ("n4",))
    found = layout_here(config(1, spares=1), JOB, ["n1", "n3"]).topology
    assert ([node.name for node in found.nodes], found.workers) == (["n1", "n3"], ("n4",))
    found = layout_here(config(0, spares=1), JOB).topology
    assert ([node.name for node in found.nodes], found.workers) == (["n1", "n2", "n3"], ())
    with pytest.raises(PlacementError, match=r"cluster.spares = 4, but the allocation has 4 nodes: n1, n2, n3, n4"):
        layout_here(config(0, spares=4), JOB)
    without = {name: value for name, value in JOB.items() if "GPU" not in name} | {"SLURMD_NODENAME": "n1"}
    found = layout_here(config(3), without).topology
    assert ([node.name for node in found.nodes], found.workers) == (["n1"], ("n2", "n3", "n4"))


@pytest.mark.parametrize(("nodes", "environ", "there"), [(4, JOB, "n1, n2, n3, n4"), (1, {}, r"\w+")])
def test_too_few_nodes_are_named(nodes: int, environ: dict[str, str], there: str) -> None:
    said = (
        rf"reward.workers_num_nodes = {nodes}, and no node is left for ranks: there is only {there}. Start the run in"
    )
    with pytest.raises(PlacementError, match=said):
        layout_here(config(nodes), environ)


def test_the_map_names_them_to_people_and_programs() -> None:
    ranks = layout_here(config(2), JOB)
    assert draw(ranks).splitlines()[-1] == "workers, and no ranks, on 2 more nodes: n3, n4"
    assert RankMap.from_json(json.loads(json.dumps(ranks.to_json()))).topology.workers == ("n3", "n4")
    assert "workers" not in draw(layout_here(config(0), JOB))
    assert "those that sbatch --nodes=3 would get" in draw_layout(config(2), {})
    assert "workers, and no ranks, on 2 more nodes: node2, node3" in draw_layout(config(2), {})
    assert layout_on(config(1), ["a", "b"], [8, 8]).topology.workers == ("b",)


def test_submit_asks_for_them_and_the_job_outlives_one() -> None:
    alone, asked = config(0), config(2, spares=1)
    for one in (alone, asked):
        one.slurm.gpus_per_node = 4
    found = [slurm_parameters(one)["slurm_additional_parameters"] for one in (alone, asked)]
    assert found[1]["nodes"] == found[0]["nodes"] + 3
    for one in (config(1), config(0, spares=1)):
        assert slurm_parameters(one)["slurm_additional_parameters"]["no-kill"] is True
    asked.slurm.nodes = 5  # a number that the user gives is the whole job's
    assert slurm_parameters(asked)["slurm_additional_parameters"]["nodes"] == 5


def test_their_step_has_all_of_each_node_and_outlives_one() -> None:
    topology = nodes_here(JOB)
    words = step_command(workers_step(topology, ["n3", "n4"], Path("/runs/a/logs")), ["agent"])
    assert {"--job-name=workers", "--nodelist=n3,n4", "--ntasks=2", "--cpus-per-task=8", "--no-kill"} <= set(words)
    assert "--output=/runs/a/logs/workers.%N.log" in words
    mixed = Topology((Node("g", 8, 64), Node("c", 0, 64)))  # a node without GPUs and one with them
    assert "--gres=none" in step_command(workers_step(mixed, ["c"], Path("logs")), ["agent"])


def test_preflight_wants_no_gpus_there_and_the_users_files(tmp_path: Path) -> None:
    asked = config(1)
    asked.run_dir, asked.env.path = str(tmp_path), "/shared/environment.py"
    ranks = layout_here(asked, JOB)
    needs = needs_of(asked, ranks, "")
    assert {("reward.remote_url", "/shared/reward.py"), ("env.path", "/shared/environment.py")} <= set(needs.places)
    assert "n4" not in needs.wanted.slots
    nodes = ("n1", "n2", "n3", "n4")
    question = Question(nodes, "n1", replace(needs, places=()), {}, ranks, lambda names: ranks, measure=False)
    gpu = {"cuda_build": "13.0", "modules": [], "slices": 0, "said": "", "driver": "580", "driver_cuda": "13.0"}
    facts = {
        node: NodeFacts(node, 0.0, {}, {**gpu, "gpus": []}, "token", "", compiler="no compiler" if node == "n4" else "")
        for node in nodes
    }
    said = {check.name: check for check in judge(Evidence(question, {}, "token", facts))}
    assert "n4" not in str(said["GPUs"].findings)
    assert "n1: no GPU can be used" in str(said["GPUs"].findings)
    assert not said["compiler"].findings

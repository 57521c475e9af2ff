"""Engines of a training run under a real slurmctld: a node of engines dies, and a spare one takes its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import ENDLESS, Cluster, said
from training_runs import steps, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

NODES = ("--actor.num_nodes=1", "--cluster.spares=1")
"""Actor and critic on one node, an engine on each of two others, and a spare one."""
SMALL = ("--algo.kl.init_coef=0", "--eval.dataset=", "--train.threads_per_rank=1", "--preflight=quick")


@pytest.fixture(scope="module")
def config(slurm: Cluster) -> Path:
    return workspace(slurm.shared / "engines")


def events(run_dir: Path) -> str:
    file = run_dir / "events.jsonl"
    return file.read_text() if file.exists() else ""


def engine_nodes(run_dir: Path) -> dict[int, str]:
    groups = json.loads((run_dir / "rank_map.json").read_text())["tp_groups"]
    return {group["engine"]: group["node"] for group in groups}


def test_a_node_of_engines_that_crashes_is_replaced_by_a_spare_one(slurm: Cluster, config: Path) -> None:
    run_dir = slurm.shared / "replaced"
    options = ["--nodes=4", "--gres=gpu:2", "--cpus-per-task=4", "--mem=8000", "--no-kill"]
    job = slurm.submit(config, run_dir, options, *NODES, *SMALL, *ENDLESS, "--train.full_determinism=false")
    slurm.wait_until(lambda: steps(run_dir) >= 2, "second step")
    slurm.wait_until(lambda: len(engine_nodes(run_dir)) == 2, "engines")
    before = engine_nodes(run_dir)
    roles = json.loads((run_dir / "rank_map.json").read_text())["roles"]
    nodes = {role: {share["node"] for share in shares} for role, shares in roles.items()}
    (spare,) = set(slurm.names) - set().union(*nodes.values())
    lost = next(engine for engine, node in before.items() if node not in nodes["actor"] | nodes["critic"])
    slurm.cluster("crash", before[lost])
    try:
        noticed = slurm.wait_until(lambda: "is lost" in events(run_dir), "loss of the engine")
        back = slurm.wait_until(lambda: "takes part again" in events(run_dir), "return of the engine")
        done = steps(run_dir)
        slurm.wait_until(lambda: steps(run_dir) > done + 1, "steps after it")
    finally:
        slurm.restart(before[lost])
        slurm.run("scancel", str(job))
    print(f"the loss of the node was noticed after {noticed:.0f} s, the engine was back {back:.0f} s later")
    assert engine_nodes(run_dir) == {**before, lost: spare}
    assert f"engine {lost} on {spare} takes part again" in events(run_dir)
    assert "Traceback" not in said(run_dir)
    slurm.wait_until(lambda: not any(slurm.left(run_dir, node) for node in slurm.names), "end of its processes")

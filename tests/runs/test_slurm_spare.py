"""A node dies under a run: in the same job a spare node takes its ranks over, or roles become smaller."""

from __future__ import annotations

import json
import re

import pytest
from slurm_cluster import CHECKOUT, Cluster, said
from slurm_undisturbed import STEPS, calm_run
from training_runs import assert_close_metrics, steps, summary, timeless
from training_runs import metrics as rows
from waiting import scaled

from slurm_rlhf.observe.run_log import read_events

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

FOUR = ["--nodes=4", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000", "--no-kill"]
COMPARED = 3
"""Steps behind a change of the layout: later ones may sample another token, where two were equally likely."""


def test_a_spare_node_takes_over_and_the_metrics_are_those_of_the_calm_run(slurm: Cluster) -> None:
    """The node of the actor's second rank crashes; of four nodes one was in reserve. Bit for bit the same numbers."""
    calm, run_dir = calm_run(slurm), slurm.shared / "spare_node"
    words = ("--cluster.spares=1", "--ckpt.save_steps=2", f"--train.max_steps={STEPS}", "--train.num_episodes=10")
    job = slurm.submit(CHECKOUT / "sbatch" / "ppo_32b.toml", run_dir, FOUR, *calm.overrides, *words)
    slurm.wait_until(lambda: steps(run_dir) >= 3 or slurm.job(job)["JobState"] not in ("PENDING", "RUNNING"), "step 3")
    before = json.loads((run_dir / "rank_map.json").read_text())["roles"]
    node = before["actor"][1]["node"]
    assert node != "gpu001"
    slurm.cluster("crash", node)
    try:
        told = slurm.wait_until(lambda: bool(summary(run_dir).get("restarts")), "restart")
        slurm.wait_until(lambda: summary(run_dir)["status"] != "running", "end of the run")
    finally:
        slurm.restart(node)  # Slurm waits for its answer before the job is over
    ended = slurm.wait_over(job)
    print(f"told after {told:.1f} s")
    assert ended == ("COMPLETED", 0), said(run_dir)
    assert told < 40
    assert timeless(rows(run_dir)) == calm.metrics
    after = json.loads((run_dir / "rank_map.json").read_text())["roles"]
    assert [share["node"] for share in after["actor"]] == ["gpu001", "gpu004"]
    assert f"left out from now on: {node}; gpu004 takes over" in said(run_dir)
    assert "restart 1 of 3 in this job: actor, critic, reference start again; the engines go on" in said(run_dir)
    assert slurm.job(job)["Restarts"] == "0"
    assert [event.event for event in read_events(run_dir / "events.jsonl")].count("restart") == 1
    slurm.wait_until(lambda: not slurm.left(run_dir, "gpu001", "gpu004"), "end of its processes")


def test_without_a_spare_the_run_goes_on_with_a_smaller_actor(slurm: Cluster) -> None:
    """The second of two nodes crashes: the actor goes on with one rank in place of two, from the checkpoint.

    Up to there the metrics are the calm run's bit for bit, and behind it to rounding.
    """
    calm, run_dir = calm_run(slurm), slurm.shared / "smaller"
    words = ("--ckpt.save_steps=2", f"--train.max_steps={STEPS}", "--train.num_episodes=10")
    two = ["--nodes=2", *FOUR[1:]]
    job = slurm.submit(CHECKOUT / "sbatch" / "ppo_32b.toml", run_dir, two, *calm.overrides, *words)
    slurm.wait_until(lambda: steps(run_dir) >= 3 or slurm.job(job)["JobState"] not in ("PENDING", "RUNNING"), "step 3")
    assert summary(run_dir)["world"] == {"actor": 2, "critic": 1, "reference": 1, "rollout": 2}
    slurm.cluster("crash", "gpu002")
    try:
        told = slurm.wait_until(lambda: bool(summary(run_dir).get("restarts")), "restart")
        slurm.wait_until(lambda: summary(run_dir)["status"] != "running", "end of the run")
    finally:
        slurm.restart("gpu002")
    ended = slurm.wait_over(job)
    print(f"told after {told:.1f} s")
    assert ended == ("COMPLETED", 0), said(run_dir)
    assert "left out from now on: gpu002; the run goes on with 1 node" in said(run_dir)
    assert "smaller from now on: actor.num_nodes = 1 (it was 2)" in said(run_dir)
    assert summary(run_dir)["world"]["actor"] == 1
    found = re.findall(r"resuming from \S+ at step (\d+)/", said(run_dir))
    at = int(found[-1])
    assert at >= 2
    print(f"went on from step {at}, with {summary(run_dir)['world']}")
    assert timeless(rows(run_dir))[:at] == calm.metrics[:at]
    assert_close_metrics(rows(run_dir)[at : at + COMPARED], rows(calm.run_dir)[at : at + COMPARED])
    assert len(rows(run_dir)) == STEPS
    assert slurm.job(job)["Restarts"] == "0"


def test_a_node_that_dies_before_its_hello_is_found_among_several_that_wait(slurm: Cluster) -> None:
    """Of two nodes nobody is heard: actors alone are there, whose torchruns wait for all. One of the two is dead."""
    calm, run_dir = calm_run(slurm), slurm.shared / "speechless"
    words = ("--actor.num_nodes=4", "--vllm.num_engines=1", "--vllm.num_nodes=1", "--algo.kl.init_coef=0")
    ends = (f"--timeout.connect={scaled(60)}", "--train.max_steps=2", "--train.num_episodes=10")
    job = slurm.submit(CHECKOUT / "sbatch" / "ppo_32b.toml", run_dir, FOUR, *calm.overrides, *words, *ends)
    log = run_dir / "logs" / "actor.gpu003.torchrun.log"
    slurm.wait_until(lambda: log.exists() and "ranks 2 to 2 of actor" in log.read_text(), "actor on gpu003")
    slurm.cluster("crash", "gpu003")
    try:
        roles = json.loads((run_dir / "rank_map.json").read_text())["roles"]
        others = {share["node"] for role, shares in roles.items() if role != "actor" for share in shares}
        assert len({"gpu002", "gpu003", "gpu004"} - others) > 1, roles
        told = slurm.wait_until(lambda: bool(summary(run_dir).get("restarts")), "restart")
        slurm.wait_until(lambda: summary(run_dir)["status"] != "running", "end of the run")
    finally:
        slurm.restart("gpu003")
    print(f"told after {told:.1f} s: {summary(run_dir)['restarts']}\n{said(run_dir)}")
    assert slurm.wait_over(job) == ("COMPLETED", 0), said(run_dir)
    assert "rank 2 on gpu003 is lost before its hello" in summary(run_dir)["restarts"][0]
    assert "left out from now on: gpu003;" in said(run_dir)

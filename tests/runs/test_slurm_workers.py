"""Rewards on nodes that are kept for workers, under a real slurmctld: faults of items, and of a node."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

import pytest
from slurm_cluster import COMMAND, Cluster, said
from training_runs import metrics, steps, summary, workspace
from waiting import scaled

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LIMIT_S = min(round(scaled(4)), 12)
GOES = ("PENDING", "CONFIGURING", "RUNNING")
STEPS, PROMPTS, SAMPLES = 8, 30, 2  # two passes over all prompts
REWARD = """
import ctypes, os, time

def reward_func(prompts, labels, responses):
    with open(os.path.join(os.path.dirname(__file__), "where"), "a") as file:
        file.write(f"{os.environ['SLURMD_NODENAME']} {os.environ['SLURM_STEP_ID']} {os.getpid()}\\n")
    time.sleep(0.1)  # the run lasts until it was looked at
    for prompt in prompts:
        if "3+4=" in prompt:
            time.sleep(1000)
        if "5+5=" in prompt:
            ctypes.string_at(0)
    return [1.0 for response in responses]
"""
KEYS = (
    *("--rollout.engine=hf", "--algo.advantage.estimator=reinforce", "--algo.kl.init_coef=0", "--eval.dataset="),
    *("--preflight=quick", f"--rollout.batch_size={PROMPTS}", f"--rollout.n_samples_per_prompt={SAMPLES}"),
    *("--train.batch_size=60", "--train.max_epochs=1", f"--train.max_steps={STEPS}", "--train.num_episodes=2"),
    *("--reward.workers=2", "--reward.workers_num_nodes=3", "--reward.on_error=-1", f"--timeout.reward={LIMIT_S}"),
)


def test_rewards_are_computed_on_nodes_of_their_own_and_outlive_two_of_these(slurm: Cluster) -> None:
    """One item of 120 hangs and one crashes its worker; then the agents of two of three nodes are killed and stopped.

    Every other item is scored, no step waits for longer than the deadline of an item, though `timeout.heartbeat`
    is longer, `status` names the lost nodes, and nothing is left.
    """
    config, run_dir = workspace(slurm.shared / "on_nodes", REWARD), slurm.shared / "workers"
    options = ["--nodes=4", "--ntasks-per-node=1", "--gres=gpu:2", "--cpus-per-task=4", "--mem=8000", "--no-kill"]
    script = run_dir.with_suffix(".sh")
    script.write_text(f'#!/bin/bash\nexec {COMMAND} train {config} --run_dir={run_dir} "$@"\n')
    job = slurm.sbatch(*options, f"--output={run_dir}.log", str(script), *KEYS)
    slurm.wait_until(lambda: steps(run_dir) >= 1 or slurm.job(job)["JobState"] not in GOES, "the first step")
    listed = slurm.run("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j %N").splitlines()
    (step,) = (line.split() for line in listed if " workers " in line)
    assert step[2] == "gpu[002-004]", listed
    for node, sent in (("gpu002", signal.SIGKILL), ("gpu003", signal.SIGSTOP)):
        (agent,) = (pid for pid, line in slurm.numbered(node) if line.endswith("slurm_rlhf.nodes.agent workers"))
        os.kill(agent, sent)
    slurm.wait_until(
        lambda: "workers" in re.findall(r"^\w+", slurm.run(COMMAND, "status", str(run_dir)), re.M), "status"
    )
    ended = slurm.wait_over(job)
    assert ended == ("COMPLETED", 0), said(run_dir)

    where = [line.split() for line in (config.parent / "where").read_text().splitlines()]
    assert {(node, number) for node, number, _ in where} == {(f"gpu00{n}", step[0].split(".")[1]) for n in (2, 3, 4)}
    assert len({pid for node, _, pid in where}) > 4  # those that failed were replaced
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    kinds = Counter(re.findall(r"^(\w+): ", (run_dir / "logs" / "reward.log").read_text(), re.M))
    assert kinds == {"late": 2 * SAMPLES, "ended": 2 * SAMPLES}
    per_step = PROMPTS * SAMPLES
    assert sum(row.get("reward/failed", 0.0) * per_step for row in rows) == pytest.approx(4 * SAMPLES)
    assert sum(row["reward"] * per_step for row in rows) == pytest.approx(
        STEPS * per_step - 2 * 4 * SAMPLES
    )  # a failed item gets -1
    assert max(row["time/reward"] for row in rows) < LIMIT_S + scaled(3)
    assert summary(run_dir)["status"] == "finished"
    lost = re.findall(r"workers are lost on (gpu\d+): .*", said(run_dir))
    assert sorted(lost) == ["gpu002", "gpu003"]
    assert not slurm.left(run_dir, *slurm.names)
    assert not [line for node in slurm.names for line in slurm.processes(node) if "slurm_rlhf.workers" in line]

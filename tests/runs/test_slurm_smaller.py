"""A node dies under a run of a real slurmctld, and roles become smaller; and the kit's checks between nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, Cluster, said
from slurm_undisturbed import STEPS, calm_run
from training_runs import assert_close_metrics, steps, summary, timeless
from training_runs import metrics as rows

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]


TWO = ["--nodes=2", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000", "--no-kill"]
COMPARED = 3
"""Steps behind a change of the layout: later ones may sample another token, where two were equally likely."""


def test_without_a_spare_the_run_goes_on_with_a_smaller_actor(slurm: Cluster) -> None:
    """The second of two nodes crashes: the actor goes on with one rank in place of two, from the checkpoint.

    Up to there the metrics are the calm run's bit for bit, and behind it to rounding.
    """
    calm, run_dir = calm_run(slurm), slurm.shared / "smaller"
    words = ("--ckpt.save_steps=2", f"--train.max_steps={STEPS}", "--train.num_episodes=10")
    job = slurm.submit(CHECKOUT / "sbatch" / "ppo_32b.toml", run_dir, TWO, *calm.overrides, *words)
    slurm.wait_until(lambda: steps(run_dir) >= 3 or slurm.job(job)["JobState"] not in ("PENDING", "RUNNING"), "step 3")
    assert summary(run_dir)["world"] == {"actor": 2, "critic": 1, "reference": 1, "rollout": 2}
    slurm.cluster("crash", "gpu002")
    try:
        slurm.wait_until(lambda: bool(summary(run_dir).get("restarts")), "restart")
        slurm.wait_until(lambda: summary(run_dir)["status"] != "running", "end of the run")
    finally:
        slurm.restart("gpu002")
    ended = slurm.wait_over(job)
    assert ended == ("COMPLETED", 0), said(run_dir)
    assert "left out from now on: gpu002; the run goes on with 1 node" in said(run_dir)
    assert "smaller from now on: actor.num_nodes = 1 (it was 2)" in said(run_dir)
    assert summary(run_dir)["world"]["actor"] == 1
    found = re.findall(r"resuming from \S+ at step (\d+)/", said(run_dir))
    at = int(found[-1])
    assert at >= 2
    assert timeless(rows(run_dir))[:at] == calm.metrics[:at]
    assert_close_metrics(rows(run_dir)[at : at + COMPARED], rows(calm.run_dir)[at : at + COMPARED])
    assert len(rows(run_dir)) == STEPS
    assert slurm.job(job)["Restarts"] == "0"


# --- slurm kit --------------------------------------------------------------------------------------------------------


SCRIPT = """#!/bin/bash
cd {checkout} && exec .venv/bin/python -m pytest -p no:cacheprovider tests/kit/test_gpu.py -m gpu --rehearse \\
  --gpu_report={reports} -k "nodes or sync-repair"
"""


def test_checks_between_nodes(slurm: Cluster) -> None:
    reports, output = slurm.shared / "kit", slurm.shared / "kit.log"
    script = slurm.shared / "kit.sh"
    script.write_text(SCRIPT.format(checkout=CHECKOUT, reports=reports))
    words = ["--nodes=2", "--ntasks-per-node=1", "--gres=gpu:2", "--cpus-per-task=4", f"--output={output}"]
    job = slurm.sbatch(*words, str(script))
    state, code = slurm.wait_over(job)
    assert (state, code) == ("COMPLETED", 0), output.read_text()
    report = json.loads((reports / "gpu_report.json").read_text())
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts == dict.fromkeys(("sync repair", "nodes", "nodes sync", "nodes ppo"), "passed")
    figures = {check["name"]: check for check in report["checks"]}
    assert figures["nodes"]["figure"].startswith("2 nodes share a directory")
    assert figures["nodes sync"]["figures"]["bytes"] > 20e6
    assert figures["nodes ppo"]["figure"].startswith("2 nodes: 3 steps over ipc")  # two GPUs a node: colocated
    assert not [path for path in Path(reports).iterdir() if path.name.startswith("gpu-check-")]

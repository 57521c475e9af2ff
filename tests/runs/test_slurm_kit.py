"""The acceptance kit's checks between nodes, rehearsed on a real Slurm of four nodes with CPU builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, Cluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

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

"""`srun --mpi=pmix -n N slurm-rlhf train`: ranks of COMM_WORLD on the nodes of a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, Cluster
from training_runs import metrics, timeless, train, workspace

pytestmark = [pytest.mark.mpi, pytest.mark.engine, pytest.mark.slow]

COMMAND = str(CHECKOUT / ".venv" / "bin" / "slurm-rlhf")
WORLD = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0"),
    *("--train.max_steps=2", "--train.threads_per_rank=1"),
)
NODES = ("--actor.num_nodes=2", "--actor.num_gpus_per_node=1", "--vllm.num_engines=2", "--vllm.num_nodes=2")
"""Actor with a rank on each of two nodes, two engines: four ranks."""

SCRIPT = """#!/bin/bash
srun --mpi=none --overlap --nodes=2 --ntasks=4 {train} 2>&1; echo "silent worlds: $?"
exec srun --mpi=pmix --overlap --nodes=2 --ntasks=4 --distribution=cyclic {train}
"""


def test_srun_with_pmix_writes_the_metrics_of_torchrun(slurm: Cluster) -> None:
    config, run_dir = workspace(slurm.shared / "work"), slurm.shared / "pmix"
    words = [COMMAND, "train", str(config), f"--run_dir={run_dir}", *WORLD, *NODES]
    script, output = slurm.shared / "pmix.sh", Path(f"{run_dir}.log")
    script.write_text(SCRIPT.format(train=" ".join(words)))
    job = slurm.sbatch("--nodes=2", "--ntasks-per-node=2", "--mem=16000", f"--output={output}", str(script))
    torchrun = slurm.shared / "torchrun"
    code, said = train(config, torchrun, *WORLD, "--actor.num_gpus_per_node=2", "--vllm.num_engines=2", warm=True)
    assert code == 0, said
    assert slurm.wait_over(job) == ("COMPLETED", 0), output.read_text()
    said = output.read_text()
    silent, _, run = said.partition("silent worlds: 2\n")
    assert silent.count("srun started 4 processes (SLURM_STEP_NUM_TASKS=4), but COMM_WORLD has 1:") == 1
    assert "Start them with srun --mpi=pmix" in silent
    assert "MPI: 4 ranks on 2 nodes;" in run
    assert " checks of 2 nodes in " in run  # preflight, with an agent on each
    assert "warning: preflight" not in run
    assert f"to look inside: srun --jobid={job} --overlap --pty" in run
    assert timeless(metrics(run_dir)) == timeless(metrics(torchrun))
    assert len(metrics(run_dir)) == 2
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs >= {"conductor.gpu001.0.log", "actor.gpu001.0.log", "actor.gpu002.1.log"}
    assert json.loads((run_dir / "session.json").read_text())["job_id"] == str(job)
    assert not any(slurm.processes(node) for node in slurm.names)

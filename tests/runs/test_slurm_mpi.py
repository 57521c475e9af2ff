"""`srun --mpi=pmix -n N slurm-rlhf train`, and `sft`: ranks of COMM_WORLD on the nodes of a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import COMMAND, Cluster
from stage_runs import make_sums
from training_runs import finished, metrics, timeless, workspace

pytestmark = [pytest.mark.mpi, pytest.mark.engine, pytest.mark.slow]

WORLD = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0"),
    *("--train.max_steps=2", "--train.threads_per_rank=1"),
)
NODES = ("--actor.num_nodes=2", "--actor.num_gpus_per_node=1", "--vllm.num_engines=2", "--vllm.num_nodes=2")
"""Actor with a rank on each of two nodes, two engines: four ranks."""

SCRIPT = """#!/bin/bash
srun --mpi=none --overlap --nodes=2 --ntasks=4 {train} 2>&1; echo "silent worlds: $?"
srun --mpi=pmix --overlap --nodes=2 --ntasks=2 --distribution=cyclic {sft} 2>&1; echo "stage: $?"
exec srun --mpi=pmix --overlap --nodes=2 --ntasks=4 --distribution=cyclic {train}
"""
STAGE = (
    *("--sft.batch_size=20", "--sft.max_epochs=2", "--data.max_len=16", "--data.apply_chat_template=false"),
    *("--ds.param_dtype=fp32", "--train.threads_per_rank=1", "--preflight=quick"),
)
"""Ten steps of two ranks."""


def test_srun_with_pmix_writes_the_metrics_of_torchrun(slurm: Cluster) -> None:
    config, run_dir = workspace(slurm.shared / "work"), slurm.shared / "pmix"
    words = [COMMAND, "train", str(config), f"--run_dir={run_dir}", *WORLD, *NODES]
    script, output = slurm.shared / "pmix.sh", Path(f"{run_dir}.log")
    stage, empty = slurm.shared / "pmix_stage", slurm.shared / "empty.toml"
    make_sums(stage)
    empty.touch()
    own = {"actor.model_name_or_path": stage / "model", "sft.dataset": stage / "sums.jsonl"}
    given = [f"--{key}={value}" for key, value in own.items()]
    sft = [COMMAND, "sft", str(empty), *NODES[:2], *given, *STAGE]
    script.write_text(SCRIPT.format(train=" ".join(words), sft=" ".join([*sft, f"--sft.output_dir={stage}/out"])))
    job = slurm.sbatch("--nodes=2", "--ntasks-per-node=2", "--mem=16000", f"--output={output}", str(script))
    torchrun = slurm.shared / "torchrun"
    finished(config, torchrun, *WORLD, "--actor.num_gpus_per_node=2", "--vllm.num_engines=2")
    assert slurm.wait_over(job) == ("COMPLETED", 0), output.read_text()
    said = output.read_text()
    silent, _, run = said.partition("silent worlds: 2\n")
    trained, _, run = run.partition("stage: 0\n")
    assert "MPI: 2 ranks on 2 nodes;" in trained
    assert "sft: step 10/10 loss " in trained
    assert {f"actor.gpu00{node + 1}.{node}.log" for node in (0, 1)} <= {
        p.name for p in (stage / "out.run/logs").iterdir()
    }
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

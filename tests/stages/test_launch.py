"""A stage on several ranks of this machine: those that it starts itself, and those that mpirun starts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest
from stage_runs import make_sums, run, started, timeless_metrics
from training_runs import mpirun
from waiting import HANG_S

pytestmark = pytest.mark.slow

COMMAND, ROLE = [sys.executable, "-m", "slurm_rlhf.cli"], "--role=actor"
KEYS = (
    '[actor]\nmodel_name_or_path = "model"\nnum_gpus_per_node = 2\n[data]\nmax_len = 16\n[ds]\n'
    'param_dtype = "fp32"\n[sft]\ndataset = "sums.jsonl"\noutput_dir = "out"\nbatch_size = 20\nmax_epochs = 4\n'
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job."""
    directory = tmp_path_factory.mktemp("launch")
    make_sums(directory)
    (directory / "job.toml").write_text(KEYS)
    return directory


@pytest.fixture(scope="module")
def measured(job: Path) -> list[str]:
    """Metrics of the ranks that the stage starts itself."""
    done = run([*COMMAND, "sft", "job.toml"], job, {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sft: activation checkpointing off, sequences packed, AdamW fused\n" in done.stdout
    assert re.search(r"^sft: step 20/20 loss ", done.stdout, re.MULTILINE)
    return timeless_metrics(job / "out.run")


def test_the_ranks_of_a_stage_are_started_and_their_errors_reported(job: Path, measured: list[str]) -> None:
    assert len(measured) == 20
    assert (job / "out" / "model.safetensors").is_file()
    assert len(list((job / "out.run" / "logs").glob("actor.*.[01].log"))) == 2
    assert not (job / "out.run" / ".control" / "keys.json").exists()
    shown = run([*COMMAND, "status", "out.run"], job, {}).stdout
    assert re.search(r"^run +\S+/out\.run: finished\nstep +20/20\n", shown, re.MULTILINE), shown
    bad = run([*COMMAND, "sft", "job.toml", "--sft.output_dir=other", "--sft.batch_size=102"], job, {})
    assert bad.returncode == 1
    assert "and no model was written" in bad.stderr
    assert "restart" not in bad.stdout  # nothing came of the first start
    assert "100 usable examples, fewer than sft.batch_size = 102: lower it" in bad.stderr
    odd = run([*COMMAND, "sft", "job.toml", "--sft.output_dir=other", "--sft.batch_size=7"], job, {})
    assert odd.returncode == 2
    assert "sft.batch_size = 7 does not divide over 2 ranks: use a multiple of 2" in odd.stderr


def test_a_rank_that_dies_starts_again_from_the_newest_checkpoint(job: Path, measured: list[str]) -> None:
    words = ["sft", "job.toml", "--sft.output_dir=killed", "--sft.save_steps=4"]
    with started([*COMMAND, *words], job) as process:
        for line in process.stdout:
            if line.startswith("sft: step 6/20 "):
                below = psutil.Process(process.pid).children(recursive=True)
                [*_, last] = (each for each in below if {"slurm_rlhf.ranks.rank_process", ROLE} <= {*each.cmdline()})
                last.kill()
                break
        said = process.stdout.read()
        assert process.wait(HANG_S) == 0, said
    assert re.search(
        r"^restart 1 of 3 in this job, from \S+/killed\.run/checkpoints/step_0000\d\d$", said, re.MULTILINE
    )
    assert re.search(r"^sft: resuming from \S+ at step \d+/20$", said, re.MULTILINE)
    assert timeless_metrics(job / "killed.run") == measured


@pytest.mark.mpi
def test_ranks_of_mpirun_write_the_metrics_of_torchrun(job: Path, measured: list[str]) -> None:
    done = run([*mpirun(2, COMMAND), "sft", "job.toml", "--sft.output_dir=by_mpi"], job, {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MPI: 2 ranks on 1 node; no role can be restarted alone" in done.stdout
    assert done.stdout.count("sft: step 20/20 loss ") == 1
    assert timeless_metrics(job / "by_mpi.run") == measured
    assert json.loads((job / "by_mpi.run" / "summary.json").read_text())["status"] == "finished"
    bad = run([*mpirun(3, COMMAND), "sft", "job.toml", "--sft.output_dir=other"], job, {})
    assert bad.returncode == 2
    assert bad.stderr.count("mpirun started 3 processes, but the roles have 2 ranks (actor 2): start") == 1
    unread = run([*mpirun(2, COMMAND), "sft", "job.toml", "--actor.learning_rate=1"], job, {})
    assert unread.returncode == 2
    assert unread.stderr.count("--actor.learning_rate is not read by `slurm-rlhf sft`") == 1

"""`slurm-rlhf pipeline` as jobs of a real Slurm that wait for each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipeline_files import BASE, FILE, made
from slurm_cluster import CHECKOUT, COMMAND, Cluster

pytestmark = [pytest.mark.engine, pytest.mark.slow]

JOBS = 'sbatch = ["--partition=gpu", "--mem=4000", "--signal=B:USR1@10", "--time=30"]\n'


def jobs_of(root: Path) -> list[int]:
    return [int(job) for job in json.loads((root / "out" / "pipeline.json").read_text())["jobs"].values()]


def test_stages_are_jobs_that_wait_for_each_other(slurm: Cluster) -> None:
    """The first fails and ends the second, both are submitted again and end; then nothing is left to do."""
    root = slurm.shared / "stages"
    root.mkdir()
    file = made(root)
    file.write_text(FILE.replace('sbatch = ["--partition=gpu"]\nsetup = ["module load cuda"]\n', JOBS, 1))
    file.write_text(file.read_text().replace('sbatch = ["--nodes=2"]\n', ""))
    (root / "sums.jsonl").rename(root / "later.jsonl")
    slurm.run(COMMAND, "pipeline", str(file))
    first, second = jobs_of(root)
    assert slurm.wait_over(first) == ("FAILED", 2)
    assert slurm.wait_over(second)[0] == "CANCELLED"
    assert "no such file" in (root / "out" / f"sft.{first}.log").read_text()
    assert "begun, and not done; job" in slurm.run(COMMAND, "status", str(root / "out"))

    (root / "later.jsonl").rename(root / "sums.jsonl")
    slurm.run(COMMAND, "pipeline", str(file))
    for job in jobs_of(root):
        ended = slurm.wait_over(job)
        assert ended == ("COMPLETED", 0), "".join(log.read_text() for log in (root / "out").glob(f"*.{job}.log"))
    logs = [*(root / "out" / "sft").rglob("actor.*.0.log")]
    assert len(logs) == 1, "one rank is a step of its job, as several are"
    lines = slurm.run(COMMAND, "status", str(root / "out")).splitlines()
    assert [line.split()[2] for line in lines] == ["done:", "done:"]

    # What has changed runs again, here in one job: the stages one after the other.
    (root / "base.toml").write_text(BASE.replace("[dpo]", "[dpo]\nlabel_smoothing = 0.1"))
    header = ["--nodes=1", "--gres=none", "--mem=4000", "--signal=B:USR1@10", "--time=30", f"--output={root}.log"]
    job = slurm.sbatch(*header, "--chdir", str(CHECKOUT), str(CHECKOUT / "sbatch" / "pipeline.sh"), str(file))
    assert slurm.wait_over(job) == ("COMPLETED", 0), Path(f"{root}.log").read_text()
    assert "sft: done, and nothing of it has changed" in Path(f"{root}.log").read_text()
    assert (root / "out" / "better.1" / "model").is_dir()

"""`slurm-rlhf pipeline` as jobs of a real Slurm that wait for each other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from pipeline_files import BASE, CHAIN, CHAIN_BASE, CHAIN_DONE, FILE, RUN, chain, made
from slurm_cluster import CHECKOUT, COMMAND, Cluster
from sums_task import toml

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

    # Stages that have changed run again, here in one job, one after the other.
    (root / "base.toml").write_text(BASE.replace("[dpo]", "[dpo]\nlabel_smoothing = 0.1"))
    header = ["--nodes=1", "--gres=none", "--mem=4000", "--signal=B:USR1@10", "--time=30", f"--output={root}.log"]
    job = slurm.sbatch(*header, "--chdir", str(CHECKOUT), str(CHECKOUT / "sbatch" / "pipeline.sh"), str(file))
    assert slurm.wait_over(job) == ("COMPLETED", 0), Path(f"{root}.log").read_text()
    assert "sft: done, and nothing of it has changed" in Path(f"{root}.log").read_text()
    assert (root / "out" / "better.1" / "model").is_dir()


HEADER = """run_dir = "out"
sbatch = ["--partition=gpu", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000", "--signal=B:USR1@10", "--time=30"]
"""


@pytest.mark.full  # the test above and test_run_pipeline have its parts
@pytest.mark.timeout(900)
def test_from_a_base_model_to_an_evaluated_policy(slurm: Cluster) -> None:
    """PPO fails and stops the evaluation; then both run, then nothing, and after a change of rm all behind it."""
    file = chain(slurm.shared / "chain")
    root, out = file.parent, file.parent / "out"
    file.write_text(HEADER + CHAIN)
    (root / "run.toml").write_text(toml({**RUN, "train.batch_size": 5}))
    slurm.run(COMMAND, "pipeline", str(file))
    first = jobs_of(root)
    for before, job in itertools.pairwise(first):
        assert slurm.job(job)["Dependency"].startswith(f"afterok:{before}"), slurm.job(job)["Dependency"]
    assert [slurm.wait_over(job) for job in first[:3]] == [("COMPLETED", 0), ("COMPLETED", 0), ("FAILED", 2)]
    assert slurm.wait_over(first[3])[0] == "CANCELLED"
    assert "32 responses do not divide into optimizer steps" in (out / f"ppo.{first[2]}.log").read_text()
    assert f"job {first[2]}: FAILED, see {out}/ppo.{first[2]}.log" in slurm.run(COMMAND, "status", str(out))

    (root / "run.toml").write_text(toml(RUN))
    assert ended(slurm, file) == ["ppo", "judged"]
    assert json.loads((out / "judged" / "eval.json").read_text())["model"] == str(out / "ppo" / "final")
    assert ended(slurm, file) == []

    (root / "base.toml").write_text(toml({**CHAIN_BASE, "rm.max_steps": 3}))
    assert ended(slurm, file) == ["rm", "ppo", "judged"]
    assert [path.name for path in sorted(out.glob("*.1"))] == ["judged.1", "ppo.1", "rm.1"]
    lines = slurm.run(COMMAND, "status", str(out)).splitlines()
    assert [line.split()[:3] for line in lines] == CHAIN_DONE
    print(*lines, slurm.run(COMMAND, "report", str(out), f"--output={out}.html"), sep="\n", flush=True)
    assert slurm.left(out, *slurm.names) == []


def ended(slurm: Cluster, file: Path) -> list[str]:
    """Run what is left of a pipeline to its end; the names of its stages."""
    state = file.parent / "out" / "pipeline.json"
    before = json.loads(state.read_text())["jobs"]
    said = slurm.run(COMMAND, "pipeline", str(file))
    now = json.loads(state.read_text())["jobs"]
    jobs = {name: int(job) for name, job in now.items() if before.get(name) != job}
    assert bool(jobs) is ("all stages are done" not in said), said
    for name, job in jobs.items():
        assert slurm.wait_over(job) == ("COMPLETED", 0), (file.parent / "out" / f"{name}.{job}.log").read_text()
    return list(jobs)

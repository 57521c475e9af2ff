"""`slurm-rlhf pipeline` without Slurm: what a file says, and stages that run, are done, change and fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_files import BASE, FILE, made
from stage_runs import ROOT, run

from slurm_rlhf.cli import pipeline
from slurm_rlhf.cli.main import main
from slurm_rlhf.cli.pipeline import script
from slurm_rlhf.cluster.slurm_job import Job
from slurm_rlhf.config.pipeline import read_pipeline


def call(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "slurm_rlhf.cli", "pipeline", str(file), *words], file.parent, {})


def test_a_file_is_read_and_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = made(tmp_path)
    whole = read_pipeline(file)
    sft, better = whole.stages
    assert better.words == [f"--actor.model_name_or_path={tmp_path}/out/sft/model", "--dpo.beta=0.2"]
    assert sft.sbatch == ["--partition=gpu", "--nodes=2"]
    assert script(whole, sft).splitlines()[1:] == [
        "module load cuda",
        f"exec {sys.executable} -m slurm_rlhf.cli pipeline {file} --only=sft",
    ]
    for old, new, stated in (
        ("{sft}", "{later}", "no stage before it is called 'later' (sft)"),
        ('command = "dpo"', 'command = "dop"', "command = 'dop'; did you mean dpo? (valid: train, sft, rm, dpo"),
        ("dpo.beta", "dpo.bta", "unknown key --dpo.bta"),
        ("dpo.beta = 0.2", "sft.max_steps = 1", "--sft.max_steps is not read by `slurm-rlhf dpo`"),
        ("dpo.beta = 0.2", 'dpo.output_dir = "x"', "dpo.output_dir: the pipeline says where its stages write"),
        ('name = "better"', 'name = "sft"', "name = 'sft': give it a name of its own"),
        ("files = [", "fils = [", "unknown key fils; did you mean files?"),
        ('setup = ["module load cuda"]', 'setup = "x"', "setup takes a list of strings, got 'x'"),
    ):
        assert old in FILE
        file.write_text(FILE.replace(old, new))
        assert main(["pipeline", str(file), "--local"]) == 2
        assert stated in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_changes_a_stage_is_what_it_reads(tmp_path: Path) -> None:
    file = made(tmp_path)
    keys = {"sft": ("sft", "data", "actor"), "dpo": ("dpo", "data", "actor")}
    before = read_pipeline(file).hashes(keys)
    (tmp_path / "base.toml").write_text(BASE.replace("[dpo]", "[dpo]\nlabel_smoothing = 0.1"))
    after = read_pipeline(file).hashes(keys)
    assert [name for name in before if before[name] != after[name]] == ["better"]
    with (tmp_path / "sums.jsonl").open("a") as rows:
        rows.write('{"input": "9+9=", "output": "18"}\n')
    more = read_pipeline(file).hashes(keys)
    assert [name for name in more if more[name] != after[name]] == ["sft", "better"]
    made_by_it = tmp_path / "out" / "sft" / "model"
    made_by_it.mkdir(parents=True)
    (made_by_it / "config.json").touch()
    assert read_pipeline(file).hashes(keys) == more
    with (tmp_path / "model" / "config.json").open("a") as model:
        model.write("\n")
    last = read_pipeline(file).hashes(keys)
    assert [name for name in last if last[name] != more[name]] == ["sft", "better"]


def test_what_slurm_knows_of_the_jobs_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that failed names its log; where nothing is left no job is said to be on its way."""
    file, out = made(tmp_path), tmp_path / "out"
    monkeypatch.setattr(pipeline, "ask_jobs", lambda job: [Job(job, job, "FAILED", "", "2:0", "0", "", "", str(file))])
    monkeypatch.setattr(pipeline.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(pipeline, "_submit", lambda whole, stage, after: stage.name[0])
    assert main(["pipeline", str(file)]) == 0
    assert f"`slurm-rlhf status {out}` shows how far they are" in capsys.readouterr().out
    assert main(["status", str(out)]) == 0
    assert f"sft     sft       not begun; job s: FAILED, see {file}\n" in capsys.readouterr().out
    monkeypatch.setattr(pipeline, "left_of", lambda whole, hashes: [])
    assert main(["pipeline", str(file)]) == 0
    assert capsys.readouterr().out.endswith(f"all stages are done: `slurm-rlhf report {out}` shows them on one page\n")


@pytest.mark.slow
def test_stages_run_once_again_when_changed_and_not_behind_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = made(tmp_path)
    (tmp_path / "pairs.jsonl").rename(tmp_path / "later.jsonl")
    failed = call(file, "--local")
    assert failed.returncode == 2, failed.stderr
    assert "no such file" in failed.stderr
    assert "the stage better ended with exit code 2: those after it do not run" in failed.stderr
    trained = (tmp_path / "out/sft/model/model.safetensors").stat()
    (tmp_path / "later.jsonl").rename(tmp_path / "pairs.jsonl")
    done = call(file, "--local")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sft: done, and nothing of it has changed")
    assert (tmp_path / "out/sft/model/model.safetensors").stat() == trained
    assert main(["status", str(tmp_path / "out")]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["sft", "sft", "done:"],
        ["better", "dpo", "done:"],
    ]
    assert main(["report", str(tmp_path / "out"), f"--output={tmp_path / 'all.html'}"]) == 0
    page = (tmp_path / "all.html").read_text()
    assert "sft/model.run" in page
    assert "better/model.run" in page
    capsys.readouterr()
    file.write_text(FILE.replace("0.2", "0.3"))
    assert main(["status", str(tmp_path / "out")]) == 0
    assert "done before, and changed since: it runs again" in capsys.readouterr().out
    # The job of a stage whose earlier stage is not done says so.
    (tmp_path / "base.toml").write_text(BASE.replace("[sft]", "[sft]\nlearning_rate = 1e-4"))
    assert main(["pipeline", str(file), "--only=better"]) == 2
    assert "the stage sft before it is not done, or has changed since" in capsys.readouterr().err
    (tmp_path / "base.toml").write_text(BASE)
    again = run(["bash", "sbatch/pipeline.sh", str(file)], ROOT, {})
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out/sft/model/model.safetensors").stat() == trained
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["better", "better.1", "pipeline.json", "sft"]

"""A pipeline whose stages are sft, rm, PPO's kin against that reward model, and an evaluation of what came of it."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from pipeline_files import CHAIN_DONE, RUN, chain
from sums_task import toml
from waiting import HANG_S
from warm_runs import WarmRun

from slurm_rlhf.cli.main import main

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMMAND = [sys.executable, "-c", "import sys; from slurm_rlhf.cli.main import main; sys.exit(main())", "pipeline"]


def call(file: Path) -> tuple[int, str]:
    """Run the stages that are left; return the exit code and what was printed."""
    run = WarmRun([*COMMAND, str(file), "--local"], {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    output, _ = run.communicate(HANG_S)
    assert run.returncode is not None
    return run.returncode, output


def test_what_a_stage_makes_is_trained_on_and_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = chain(tmp_path)
    (tmp_path / "run.toml").write_text(toml({**RUN, "train.batch_size": 5}))
    out = tmp_path / "runs" / "chain"
    assert main(["check", str(file)]) == 2
    found = capsys.readouterr()
    assert "rm: steps: 2, each with 20 examples" in found.out
    assert "error: ppo: rollout.batch_size * rollout.n_samples_per_prompt = 8 * 4 = 32 responses do not" in found.err
    code, output = call(file)
    assert code == 2, output
    assert "32 responses do not divide into optimizer steps of train.batch_size = 5" in output
    assert "the stage ppo ended with exit code 2: those after it do not run" in output
    assert not (out / "judged").exists()
    weights = [out / name / "model" / "model.safetensors" for name in ("sft", "rm")]
    trained = [file.stat().st_mtime_ns for file in weights]

    (tmp_path / "run.toml").write_text(toml(RUN))
    code, output = call(file)
    assert code == 0, output
    assert trained == [file.stat().st_mtime_ns for file in weights]
    config = tomllib.loads((out / "ppo" / "config.toml").read_text())
    assert config["actor"]["model_name_or_path"] == str(out / "sft" / "model")
    assert config["reward"]["model_name_or_path"] == str(out / "rm" / "model")
    judged = json.loads((out / "judged" / "eval.json").read_text())
    assert judged["model"] == str(out / "ppo" / "final")
    assert main(["status", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == CHAIN_DONE

    ran = {path: path.stat().st_mtime_ns for path in out.glob("*/**/*.json*")}
    assert main(["pipeline", str(file), "--local"]) == 0
    assert capsys.readouterr().out.count("done, and nothing of it has changed") == len(lines)
    assert ran == {path: path.stat().st_mtime_ns for path in ran}
    (tmp_path / "run.toml").write_text(toml({**RUN, "train.max_steps": 2}))
    assert main(["status", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[:2]] == ["done:", "done:"]
    assert all("done before, and changed since: it runs again" in line for line in lines[2:])

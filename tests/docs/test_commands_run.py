"""Commands of the pages that need a run directory or write files: run as they stand, with files in place of names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_run import write_run
from shown_commands import shown

from slurm_rlhf.cli import main as cli


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Run a command in this process and return what it prints."""
    capsys.readouterr()
    assert cli.main(words) == code, capsys.readouterr().err
    return capsys.readouterr().out


def test_reports_and_states_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(write_run(tmp_path / f"run{seed}", steps=6, seed=seed).root) for seed in (1, 2, 3)]
    monkeypatch.chdir(tmp_path)
    said([*shown("report RUN")[:1], runs[0]], capsys)
    assert (tmp_path / "run1" / "report.html").is_file()
    words = shown("report RUN RUN RUN --output=seeds.html")
    said([words[0], *runs, words[-1]], capsys)
    data = (tmp_path / "seeds.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert len(json.loads(data)["runs"]) == 3
    assert "finished" in said([shown("status RUN")[0], runs[0]], capsys)
    name, _, option = shown("cancel RUN [--save_first]")
    assert "nothing to cancel" in said([name, runs[0], option], capsys)


def test_files_of_a_new_run_and_of_a_migrated_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said([*shown("init mine"), "--yes"], capsys)
    assert (tmp_path / "mine.toml").is_file()
    (tmp_path / "run.sh").write_text(
        "python -m openrlhf.cli.train_ppo_ray --pretrain /models/x --actor_learning_rate 5e-7\n"
    )
    assert "learning_rate = 5e-07" in said(shown("migrate openrlhf run.sh"), capsys)
    assert "actor.learning_rate" in said([*shown("train --help GROUP")[:2], "actor"], capsys)

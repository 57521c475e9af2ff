"""The words of `slurm-rlhf campaign`."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.cli import campaign
from slurm_rlhf.cli.main import main


def test_list_draws_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["campaign", "--list", "--faults=7", "--seed=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    drawn = [line for line in lines if "(needs " not in line]
    assert len(drawn) == 7
    assert any("needs Slurm: bash tests/run.sh -m campaign" in line for line in lines)
    assert main(["campaign", "--list", "--faults=7", "--seed=3"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, told",
    [
        (["--fault=3"], "unknown option '--fault=3'; did you mean --faults?"),
        (["--faults"], "--faults takes a value: --faults=..."),
        (["--faults=many"], "--faults=many: give a number, 0 or more"),
        (["--list=yes"], "--list takes no value"),
        (["--only=earthquake"], "no fault that this machine can run has such a name (--list)"),
        (["--only=("], "--only=(: no regular expression"),
    ],
)
def test_wrong_words_are_told_with_the_right_ones(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["campaign", *words]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said


def test_a_directory_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["campaign", f"--out={tmp_path}"]) == 2
    assert "holds something already: give a new directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_without_anything_in_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_rows", lambda out, drawn, seed: iter(()))
    main(["campaign", f"--out={tmp_path}"])
    assert len(list(tmp_path.iterdir())) > 0  # the table of no faults


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["campaign", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"--{name}" in page for name in ("faults", "seed", "only", "storm", "out", "list"))

"""The words of `tests/lab/fault_campaign.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_campaign import main


def test_list_draws_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--list", "--faults=7", "--seed=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "(needs " not in line]) == 7
    assert any("needs Slurm: bash tests/run.sh -m campaign" in line for line in lines)
    assert main(["--list", "--faults=7", "--seed=3"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, told",
    [
        (["--only=earthquake"], "no fault that this machine can run has such a name (--list)"),
        (["--only=("], "--only=(: no regular expression"),
        (["--out=.."], "holds something already: give a new directory"),
    ],
)
def test_wrong_words_are_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]

"""The file that tells which phase a run is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.observe.phase_file import PhaseFile, read_phase


def test_the_last_phase_is_read_whole_whatever_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "phase"
    path.write_text("x" * 1000)
    file = PhaseFile(path)
    for name in ("a much longer phase than the others", "sync", ""):
        file.tell(name, 7)
        now = read_phase(path)
        assert now is not None
        assert (now.phase, now.step) == (name, 7)


def test_a_file_that_is_missing_or_holds_something_else_is_none(tmp_path: Path) -> None:
    assert read_phase(tmp_path / "phase") is None
    for text in ("", "{", "[1]", '{"phase": "sync"}'):
        (tmp_path / "phase").write_text(text)
        assert read_phase(tmp_path / "phase") is None


def test_a_directory_that_is_gone_is_an_error_of_the_first_line_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PhaseFile(tmp_path / "gone" / "phase").tell("sync", 1)
    file = PhaseFile(tmp_path / "phase")
    file.tell("sync", 1)
    (tmp_path / "phase").unlink()
    file.tell("update", 2)
    assert read_phase(tmp_path / "phase") is None

"""Directories on a node's own disk: how long they last, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slurm_rlhf.cluster.local_directory import take_directory, take_temporary

HOLD = """
import sys
from pathlib import Path
from slurm_rlhf.cluster.local_directory import take_directory
print(take_directory("other", Path(sys.argv[1])).path, flush=True)
import os
os.execvp("sleep", ["sleep", "60"])
"""


def test_a_directory_lasts_as_long_as_its_process_and_what_that_becomes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            assert theirs.is_dir()
            (theirs / "kernel").write_text("compiled")
            mine = take_directory("mine", tmp_path).path
            assert theirs.is_dir()
        finally:
            other.kill()
    take_directory("next", tmp_path)
    assert not theirs.exists()
    assert mine.is_dir()
    assert mine.parent.stat().st_mode & 0o077 == 0


def test_a_directory_that_somebody_else_put_there_is_not_used(tmp_path: Path) -> None:
    planted = tmp_path / "elsewhere"
    planted.mkdir()
    (tmp_path / f"slurm_rlhf.{os.getuid()}").symlink_to(planted)
    own = take_directory("mine", tmp_path).path
    assert planted not in own.resolve().parents
    assert list(planted.iterdir()) == []


@pytest.mark.parametrize("length", [0, 80])
def test_a_directory_for_sockets_has_a_short_path_and_goes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """vLLM puts names of 37 characters behind it, and a socket's path has 107 at most."""
    place = tempfile.mkdtemp(prefix="t") if not length else str(tmp_path / ("x" * length))
    Path(place).mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", place)
    made = take_temporary()
    assert made.path.stat().st_uid == os.getuid()
    assert len(str(made.path)) + 37 <= 107
    assert str(made.path).startswith("/tmp/slurm_rlhf." if length else place)
    (made.path / "socket").touch()
    made.remove()
    made.remove()
    assert not made.path.exists()
    assert length or not list(Path(place).iterdir())

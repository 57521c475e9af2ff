"""sbatch/environment.sh and sbatch/quickstart.sh up to the environment: reuse, places, and what a user gets wrong."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MADE_HERE = (ROOT / ".venv" / "packages.stamp").is_file()


def run(script: Path, *args: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """With nothing of this process's environment but PATH, and a home directory that is not there."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PIP_CONFIG_FILE": os.devnull} | variables
    return subprocess.run(
        [*prefix, "bash", str(script), *args],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def without_network() -> tuple[str, ...]:
    """A prefix for commands: a network namespace of their own where this user may have one."""
    prefix = ("unshare", "--map-root-user", "--net")
    allowed = shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if allowed and allowed.returncode == 0 else ()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment."""
    shutil.copytree(ROOT / "sbatch", tmp_path / "checkout" / "sbatch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "checkout")
    return tmp_path / "checkout"


@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
@pytest.mark.timeout(60)
def test_a_current_environment_is_reused_without_network_or_home() -> None:
    before = (ROOT / ".venv" / "packages.stamp").stat().st_mtime_ns
    result = run(ROOT / "sbatch" / "quickstart.sh", "--setup-only", prefix=without_network())
    assert result.returncode == 0, result.stderr
    assert "is current" in result.stderr
    assert "2/4" not in result.stdout
    assert (ROOT / ".venv" / "packages.stamp").stat().st_mtime_ns == before


@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
@pytest.mark.parametrize("place", [ROOT, ROOT / "sbatch"])
def test_slurms_copy_of_the_script_finds_the_checkout_it_was_submitted_from(tmp_path: Path, place: Path) -> None:
    copy = Path(shutil.copy(ROOT / "sbatch" / "quickstart.sh", tmp_path / "slurm_script"))
    result = run(copy, "--setup-only", SLURM_SUBMIT_DIR=str(place))
    assert result.returncode == 0, result.stderr
    assert f"{ROOT}/.venv is current" in result.stderr


def test_a_copy_without_a_checkout_says_how_to_submit(tmp_path: Path) -> None:
    copy = Path(shutil.copy(ROOT / "sbatch" / "quickstart.sh", tmp_path / "slurm_script"))
    result = run(copy, "--setup-only", SLURM_SUBMIT_DIR=str(tmp_path))
    assert result.returncode == 1
    assert f"SLURM_SUBMIT_DIR={tmp_path}" in result.stderr
    assert "sbatch sbatch/quickstart.sh" in result.stderr


def test_help_starts_nothing(checkout: Path) -> None:
    result = run(checkout / "sbatch" / "quickstart.sh", "--help")
    assert result.returncode == 0
    assert "--setup-only" in result.stdout
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_missing_or_unsuitable_is_named(checkout: Path, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text(
        f"#!/bin/sh\n{{ echo 'import sys; sys.version_info = (3, 9, 2)'; cat; }} | exec {sys.executable} -\n"
    )
    old.chmod(0o755)
    missing = run(checkout / "sbatch" / "environment.sh", SLURM_RLHF_PYTHON="python-of-mine")
    assert missing.returncode == 1
    assert "python-of-mine: not found" in missing.stderr
    unsuitable = run(checkout / "sbatch" / "environment.sh", SLURM_RLHF_PYTHON=str(old))
    assert unsuitable.returncode == 1
    assert "is Python 3.9.2; 3.11 to 3.13 is needed" in unsuitable.stderr
    assert not (checkout / ".venv").exists()


def test_an_environment_of_somebody_else_is_left_alone(checkout: Path) -> None:
    theirs = checkout / ".venv" / "theirs"
    theirs.parent.mkdir()
    theirs.touch()
    result = run(checkout / "sbatch" / "environment.sh")
    assert result.returncode == 1
    assert "was not made by this script: move it away" in result.stderr
    assert theirs.exists()


def test_two_at_once_wait_for_each_other(checkout: Path) -> None:
    with (checkout / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            ["bash", str(checkout / "sbatch" / "environment.sh")],
            env=os.environ | {"SLURM_RLHF_PYTHON": "python-of-mine"},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert waiting.stderr is not None
        assert "waiting for it" in waiting.stderr.readline()
        assert waiting.poll() is None
    _, rest = waiting.communicate(timeout=30)
    assert "python-of-mine: not found" in rest


@pytest.mark.full
@pytest.mark.timeout(120)
def test_an_index_without_torch_is_named_and_the_next_try_starts_over(checkout: Path) -> None:
    variables = {
        "SLURM_RLHF_PYTHON": str(Path(sys.base_prefix) / "bin" / "python3"),
        "SLURM_RLHF_TORCH_INDEX": (checkout / "empty-index").as_uri(),
    }
    result = run(checkout / "sbatch" / "environment.sh", **variables)
    assert result.returncode == 1
    assert "no torch==2.13.0+cpu from SLURM_RLHF_TORCH_INDEX=file://" in result.stderr
    (checkout / ".venv" / "half-made").touch()
    again = run(checkout / "sbatch" / "environment.sh", **variables)
    assert again.returncode == 1
    assert not (checkout / ".venv" / "half-made").exists()

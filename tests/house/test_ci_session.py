"""The session's order that conftest.py keeps: each breach of it, in a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"
CONFTEST = (TESTS / "conftest.py").read_text(encoding="utf-8")

LEAK = """
import subprocess
from pathlib import Path

def test_leaves_a_child():
    child = subprocess.Popen(["sleep", "61"])
    Path("pids").write_text(str(child.pid))

def test_leaves_an_orphan():
    subprocess.run("setsid sleep 62 & echo $! >>pids.orphan", shell=True, check=True)
"""

SKIP = """
import pytest

def test_for_a_gpu():
    pytest.skip("needs a GPU: none here")

@pytest.mark.skipif(True, reason="no vllm here")
def test_for_vllm():
    pass
"""

STUCK = """
import signal, time
import pytest

@pytest.mark.timeout(1)
def test_that_no_signal_reaches():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(100)
"""


def session(directory: Path, tests: str, ci: bool = False) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text(
        CONFTEST.replace("GRACE = 20.0", "GRACE = 0.5").replace("SETTLE = scaled(10.0)", "SETTLE = 0.3")
    )
    (directory / "test_it.py").write_text(tests)
    (directory / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    environment["PYTHONPATH"] = f"{SUPPORT}:{environment.get('PYTHONPATH', '')}"  # of what conftest.py imports
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=directory,
        env=environment | ({"CI": "true"} if ci else {}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_processes_left_behind_fail_the_session_and_are_ended(tmp_path: Path) -> None:
    result = session(tmp_path, LEAK)
    assert result.returncode == 1
    assert "2 passed" in result.stdout
    assert "still running after the tests" in result.stdout
    assert "sleep 61" in result.stdout
    assert "sleep 62" in result.stdout
    assert not alive(int((tmp_path / "pids").read_text()))
    assert not alive(int((tmp_path / "pids.orphan").read_text()))


def test_under_ci_only_what_the_machine_lacks_may_be_skipped(tmp_path: Path) -> None:
    strict = session(tmp_path, SKIP, ci=True)
    assert strict.returncode == 1
    assert "skipped under CI: test_it.py::test_for_vllm: no vllm here" in strict.stdout
    assert "test_for_a_gpu" not in strict.stdout
    assert session(tmp_path, SKIP).returncode == 0


def test_a_test_that_cannot_be_interrupted_ends_the_session(tmp_path: Path) -> None:
    result = session(tmp_path, STUCK)
    assert result.returncode == 3
    assert re.search(r"test_that_no_signal_reaches: not over after \S+ s", result.stderr)
    assert "line 8 in test_that_no_signal_reaches" in result.stderr

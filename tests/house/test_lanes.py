"""Sessions of the tests: lanes, and what a session under CI does not let pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lanes
import psutil
import pytest
from programs import completed
from waiting import scaled

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]

RUN = f"""
import sys
sys.path.insert(0, {str(TESTS / "support")!r})
import lanes
lanes.AGAIN_S = {scaled(10)}
sys.exit(lanes.run({{}}{{}}))
"""
GOOD = "def test_good():\n    pass\n"
BAD = "def test_bad():\n    assert 1 == 2, 'the reason'\n\n\ndef test_fine():\n    pass\n"
ODD = """
from pathlib import Path

def test_odd():
    seen = Path("seen").exists()
    Path("seen").touch()
    assert seen
"""
ENDED = "import os\n\n\ndef test_ends():\n    os._exit(STATUS)\n"


def side_by_side(directory: Path, limit: str = "", **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    chosen = {name: [f"test_{name}.py"] for name in files}
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-c", RUN.format(chosen, limit)]
    return completed(command, cwd=directory)


def test_a_failure_is_shown_whole_and_fails_the_run(tmp_path: Path) -> None:
    done = side_by_side(tmp_path, one=GOOD, two=BAD)
    assert done.returncode == 1, done.stderr
    assert "\n  one | test_one.py ." in done.stdout
    assert "\n  two | test_two.py F." in done.stdout
    _, _, report = done.stdout.partition("##### lane two: exit status 1\n")
    assert "AssertionError: the reason" in report
    assert "2 passed, 1 failed in" in done.stdout
    assert done.stdout.endswith("FAILED: test_two.py::test_bad\n")


def test_what_fails_once_is_run_again_alone_and_reported(tmp_path: Path) -> None:
    done = side_by_side(tmp_path, one=GOOD, two=ODD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  test_two.py::test_odd\n    assert False" in done.stdout
    assert "##### all lanes: 2 passed in" in done.stdout
    assert done.stdout.endswith(" s: passed; flaky: test_two.py::test_odd\n")


def test_too_many_that_fail_once_fail_the_run(tmp_path: Path) -> None:
    odd = [ODD.replace("odd", f"odd_{number}").replace('seen"', f'seen_{number}"') for number in range(lanes.FLAKY + 1)]
    done = side_by_side(tmp_path, one=GOOD, two="\n\n".join(odd))
    assert done.returncode == 1
    assert f"{lanes.FLAKY + 1} flaky tests, at most {lanes.FLAKY} may be" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("status", [3, 0])
@pytest.mark.parametrize("last", ["one", "two"])
def test_a_session_that_is_cut_off_fails_the_run(tmp_path: Path, last: str, status: int) -> None:
    files = {"one": GOOD, "two": GOOD, last: ENDED.replace("STATUS", str(status))}
    done = side_by_side(tmp_path, **files)
    assert done.returncode == 1
    assert f"FAILED: {last} ({status})" in done.stdout


SWALLOWS = """
import signal, time

def test_swallows():
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler))
    time.sleep(1000)
"""


def test_after_the_limit_the_lanes_are_interrupted_and_say_what_failed(tmp_path: Path) -> None:
    cores = [f"lane{number}" for number in range(len(os.sched_getaffinity(0)))]
    files = dict.fromkeys(cores, BAD + SWALLOWS) | {"last": GOOD}
    done = side_by_side(tmp_path, f", {scaled(10)}", **files)
    assert done.returncode == 1
    assert "KeyboardInterrupt" in done.stdout
    assert "AssertionError: the reason" in done.stdout
    ended = done.stdout.splitlines()[-1]
    assert all(f"{name} (2)" in ended and f"test_{name}.py::test_bad" in ended for name in cores)
    assert "last (not begun)" in ended


def test_every_test_file_is_in_one_lane(tmp_path: Path) -> None:
    """Files that no lane names are in one, too. Empty files stand for this checkout's, in the same folders."""
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    files += [Path("runs", "test_new.py"), Path("newroom", "test_new.py")]
    for file in files:
        (tmp_path / "tests" / file.parent).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / file).write_text(GOOD)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    collected: list[str] = []
    for arguments in lanes.chosen(tmp_path / "tests").values():
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
        done = completed(command, check=True, cwd=tmp_path)
        collected += [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]
    assert sorted(collected) == sorted(f"tests/{file}" for file in files)
    assert collected[0] == f"tests/runs/{lanes.FIRST}"
    halves = lanes.halves(tmp_path / "tests").values()
    assert sorted(word for words in halves for word in words[2:]) == sorted(
        f"{tmp_path}/tests/{file}" for file in files
    )


def test_only_the_lane_of_slurm_starts_a_cluster() -> None:
    asking = {path for path in TESTS.rglob("test_*.py") if re.search(r"\bslurm: Cluster\b", path.read_text())}
    assert {str(path) for path in asking} == set(lanes.chosen()["slurm"])


# --- ci session -------------------------------------------------------------------------------------------------------


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
    environment["PYTHONPATH"] = f"{SUPPORT}:{environment.get('PYTHONPATH', '')}"  # conftest.py imports from there
    environment |= {"CI": "true"} if ci else {}
    return completed([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=directory, env=environment)


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


def test_a_session_that_is_interrupted_names_the_test_that_it_was_in(tmp_path: Path) -> None:
    result = session(tmp_path, GOOD + "\n\ndef test_long():\n    raise KeyboardInterrupt\n")
    assert result.returncode == 2
    assert "SESSION FAILED: interrupted in test_it.py::test_long (call)" in result.stdout


def test_a_test_that_cannot_be_interrupted_ends_the_session(tmp_path: Path) -> None:
    result = session(tmp_path, STUCK)
    assert result.returncode == 3
    assert re.search(r"test_that_no_signal_reaches: not over after \S+ s", result.stderr)
    assert "line 8 in test_that_no_signal_reaches" in result.stderr

"""The session's order: time limits, marks, and what no test may leave behind: processes, changes of os.environ."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import settings
from waiting import scaled

if TYPE_CHECKING:
    from rollout_engine import EngineProcess
    from slurm_cluster import Cluster

    from slurm_rlhf.cluster.stop import Stop
    from slurm_rlhf.data.tokenizer import Tokenizer

MARK = "SLURM_RLHF_TEST_SESSION"
"""A variable of every process that this test session starts, directly or not."""

GRACE = 20.0  # seconds after a test's own time limit: for code that signals do not reach, such as a blocked C call
SETTLE = scaled(10.0)  # seconds that processes have to leave after the last test
ABSENT = ("needs a GPU", "needs several GPUs")
"""Beginnings of the only reasons for which a test may be skipped under CI: what its machines do not have."""

NOT_FAST = ("slurm", "mpi", "engine", "slow", "full", "campaign", "gpu")
"""Marks of tests that `-m fast` leaves out."""
MARKS_OF_FIXTURES = {"slurm": "slurm", "engine_process": "engine"}
"""Marks that a test has because it asks for a fixture; a test file may add its own under this name."""
ASKED_FOR = ("full", "campaign", "gpu")
"""Marks of tests that run only where `-m` names the mark, or is empty."""

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that pytest sets, and libraries when they are imported."""

FIRST = "test_fences.py"
"""Name of tests that run before all others: they say which library has changed, where the others only fail."""

skipped: list[tuple[str, str]] = []


@pytest.fixture(scope="session")
def engine_process() -> Iterator[EngineProcess]:
    """Start one process for all tests of an engine: importing vLLM takes as long as most of them together."""
    from rollout_engine import EngineProcess

    process = EngineProcess()
    yield process
    process.end()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with random weights for an engine."""
    from tiny_models import make_tiny, mislabel

    return mislabel(make_tiny(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", heads=2, kv_heads=1))


@pytest.fixture
def fresh(engine: EngineProcess) -> EngineProcess:
    """The engine of a test file, with the directory's weights, as policy 0."""
    from rollout_engine import update

    engine.run(update, 0)
    return engine


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Start the cluster for the first test that asks for it, and end it with the session."""
    from slurm_cluster import running_cluster

    with running_cluster() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with random weights, of the usual architecture and sizes."""
    from tiny_models import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of such a model, as a run reads it."""
    from random_models import saved_tokenizer

    return saved_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Stop]:
    """Tell a run in the directory of the test when to stop."""
    from slurm_rlhf.cluster.stop import Stop

    with Stop(tmp_path) as listening:
        yield listening


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[object]:
    """End the jobs of a test that failed: the tests after it need the nodes."""
    report = yield
    if report.failed and (cluster := getattr(item, "funcargs", {}).get("slurm")) is not None:
        try:
            cluster.clear()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            report.sections.append(("the cluster after it", str(error)))
    return report


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_environment() -> Iterator[None]:
    """Fail a module whose fixtures leave os.environ changed."""
    with unchanged_environment():
        yield


@pytest.fixture(autouse=True)
def _test_leaves_environment(_module_leaves_environment: None) -> Iterator[None]:
    """Fail a test that leaves os.environ changed: the next test, or its child processes, would differ."""
    with unchanged_environment():
        yield


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Give the test an os.environ of its own, for code that prepares the environment of its process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Undo changes of os.environ in the block, and fail for them."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed = sorted(names - SET_BY_OTHERS)
    said = ", ".join(f"{name}={after.get(name)!r} (was {before.get(name)!r})" for name in changed)
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if changed:
        pytest.fail(f"os.environ is left changed, use monkeypatch or own_environment: {said}", pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    """Mark this test session's processes, and keep them from taking every core each."""
    os.environ[MARK] = uuid.uuid4().hex
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the acceptance kit on GPUs, `-m gpu`."""
    group = parser.getgroup("gpu", "the acceptance kit on GPUs (-m gpu)")
    group.addoption("--rehearse", action="store_true", help="run the kit on CPUs: no figure is a GPU's")
    group.addoption("--gpu_report", default="", metavar="DIR", help="where gpu_report.md and .json go [the checkout]")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep what is imported and collected out of the garbage collector: it stays, and is a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules look for leaks at the end
        gc.set_threshold(5000, 10, 20)  # the few that tests add would have all of them looked at 30 times
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, and those without any such mark as fast.

    The longer product of cases, the fault campaign and the kit for GPUs run when they are asked for: `-m full`,
    `-m campaign`, `-m gpu`, or a test by its name with `-m ""`.
    """
    for item in items:
        marks = MARKS_OF_FIXTURES | getattr(getattr(item, "module", None), "MARKS_OF_FIXTURES", {})
        for fixture in set(getattr(item, "fixturenames", ())) & marks.keys():
            item.add_marker(marks[fixture])
        if not any(item.get_closest_marker(mark) for mark in NOT_FAST):
            item.add_marker("fast")
        item.add_marker(pytest.mark.timeout(scaled(_limit(item))), append=False)
    items.sort(key=lambda item: item.path.name != FIRST)
    expression = config.option.markexpr
    if not expression and "-m" in config.invocation_params.args:
        return
    unasked = [mark for mark in ASKED_FOR if mark not in expression]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in unasked)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The hard limit: pytest-timeout's signal ends a test in Python code, this one also in code that is stuck in C."""
    limit = _limit(item)
    watchdog = threading.Timer(limit + GRACE, _give_up, (item, limit + GRACE))
    watchdog.daemon = True
    if limit:
        watchdog.start()
    try:
        return (yield)
    finally:
        watchdog.cancel()


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker and marker.args:
        return float(marker.args[0])
    return float(item.config.getini("timeout") or 0)


def _give_up(item: pytest.Item, seconds: float) -> None:
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture:
        capture.suspend_global_capture(in_=True)
    print(
        f"\n{item.nodeid}: not over after {seconds:g} s and not to be stopped. Its threads:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.stderr)
    for process in _leftovers():
        _kill(process)
    os._exit(3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember why tests were skipped."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End what the tests left running, and fail the session for it; under CI also for a test that was skipped."""
    problems = []
    if "warm_runs" in sys.modules:
        sys.modules["warm_runs"].end()
    gc.unfreeze()
    gc.collect()  # ends what belongs to an unused object, such as the process that renders a chat template
    deadline = time.monotonic() + SETTLE
    while (left := _leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        problems.append(f"still running after the tests: {_describe(process)}")
        _kill(process)
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        problems.append(f"interrupted in {os.environ.get('PYTEST_CURRENT_TEST', 'no test')}")
    if os.environ.get("CI") == "true":
        problems += [f"skipped under CI: {name}: {why}" for name, why in skipped if not why.startswith(ABSENT)]
    if problems and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.config.stash[PROBLEMS] = problems


PROBLEMS = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what failed the session, apart from its tests."""
    for problem in config.stash.get(PROBLEMS, []):
        terminalreporter.write_line(f"SESSION FAILED: {problem}", red=True)


def _leftovers() -> list[psutil.Process]:
    """Living processes of these tests: by their mark, also where their parents are gone, or as our descendants."""
    me = psutil.Process()
    found = {process.pid: process for process in me.children(recursive=True)}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != me.pid and _is_marked(entry):
            found.setdefault(int(entry.name), psutil.Process(int(entry.name)))
    return [process for process in found.values() if _counts(process)]


def _is_marked(entry: Path) -> bool:
    try:
        environment = (entry / "environ").read_bytes()
    except OSError:  # it ended, or is not ours
        return False
    return f"{MARK}={os.environ[MARK]}".encode() in environment.split(b"\0")


def _counts(process: psutil.Process) -> bool:
    """Whether a process is alive and not Python's helper of multiprocessing, which lives as long as this one."""
    try:
        return (
            process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
            and not any("multiprocessing.resource_tracker" in part for part in process.cmdline())
        )
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)

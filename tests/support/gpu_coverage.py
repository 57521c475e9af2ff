"""Which lines the tests with stand-ins (tests/gpu/) reach, and which they would have to.

Coverage runs around each of those tests, in the processes that install the stand-ins too; it is no test run of its own.
`tests/gpu/test_visited_lines.py` comes after them and judges. Run alone, it runs them first, once, in a child.
"""

from __future__ import annotations

import ast
import atexit
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[2]
GPU_FILES = (
    "weights/_torch.py",
    "weights/member.py",
    "weights/backends/nccl.py",
    "weights/backends/device_ipc.py",
)
"""Code that runs on GPUs alone. At least `ENOUGH` of each file's lines have to run with the stand-ins."""
ROOMS = ("weights", "ranks", "groups", "sampling", "run", "rewards", "trainer", "engine", "bench")
"""In these every CUDA branch has to be taken."""
ENOUGH = 0.95
DIRECTORY = "SLURM_RLHF_GPU_COVERAGE"
"""In the environment: where processes put what they have measured."""
JUDGE = "test_visited_lines.py"

STAND_INS = {path for path in (ROOT / "tests" / "gpu").glob("test_*.py") if path.name != JUDGE}
"""The test files with stand-ins."""

_ABOUT_GPUS = re.compile(r"cuda|nccl|_cpu\b|\bon_gpus?\b|device\.type|device_name\(|me\.device", re.IGNORECASE)


class Recorder:
    """A plugin of pytest: measures the tests with stand-ins, and lets the judge come last."""

    here = False
    """Whether this process is measured already."""

    def __init__(self, config: pytest.Config) -> None:
        self._inherited = os.environ.get(DIRECTORY)
        self._own = None if self._inherited else tempfile.TemporaryDirectory(prefix="gpu-coverage-")
        self.directory = Path(self._inherited or self._own.name)  # type: ignore[union-attr]
        Recorder.here = True
        self.complete = False
        """Whether this run of pytest has every test with stand-ins."""
        self._coverage: Any = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        judges = [item for item in items if item.path.name == JUDGE]
        self.complete = {item.path for item in items if _measured(item)} == STAND_INS
        if judges:
            items[:] = [item for item in items if item.path.name != JUDGE] + judges

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not _measured(item):
            return (yield)
        if self._coverage is None:
            os.environ[DIRECTORY] = str(self.directory)
            self._coverage = _measuring(self.directory)
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()

    def pytest_unconfigure(self) -> None:
        if self._coverage is not None:
            self._coverage.save()
        if self._own is not None:
            os.environ.pop(DIRECTORY, None)
            self._own.cleanup()

    def reached(self) -> dict[str, set[int]]:
        """Lines by file under slurm_rlhf/ that the tests with stand-ins have run."""
        if not self.complete:
            return _alone()
        if self._coverage is not None:
            self._coverage.save()
        return _read(self.directory)


def measure_here() -> None:
    """In a process that a test started: measure until it ends. Called where the stand-ins are installed."""
    directory = os.environ.get(DIRECTORY)
    if not directory or Recorder.here:
        return
    Recorder.here = True
    measuring = _measuring(Path(directory))
    measuring.start()
    _children.append(measuring)
    atexit.register(save_here)


def save_here() -> None:
    """Put down what this process, which a test started, has run so far: it may be killed later."""
    for measuring in _children:
        measuring.save()


@contextmanager
def measured(directory: str) -> Iterator[None]:
    """Measure a piece of work in a process that tests without stand-ins use as well. `directory`: `DIRECTORY`'s value
    in pytest's process; empty where nothing is measured."""
    if not directory:
        yield
        return
    measuring = _measuring(Path(directory))
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()


_children: list[Any] = []


def _measured(item: pytest.Item) -> bool:
    return item.path in STAND_INS


def _measuring(directory: Path) -> Any:
    return coverage.Coverage(
        data_file=str(directory / "found"),
        data_suffix=True,
        source=[str(ROOT / "slurm_rlhf")],
        config_file=False,
        branch=True,
        messages=False,
    )


def _alone() -> dict[str, set[int]]:
    """Run the tests with stand-ins for their coverage; a failure there is theirs to report, and one here."""
    with tempfile.TemporaryDirectory(prefix="gpu-coverage-") as directory:
        tests = [str(path) for path in sorted(STAND_INS)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=ROOT,
            env={**os.environ, DIRECTORY: directory},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, f"the tests with stand-ins fail:\n{done.stdout[-4000:]}"
        return _read(Path(directory))


def _read(directory: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for path in directory.glob("found.*"):
        data = coverage.CoverageData(str(path))
        with suppress(coverage.exceptions.DataError):  # of a process that was killed while it wrote
            data.read()
            for name in data.measured_files():
                place = str(Path(name).relative_to(ROOT / "slurm_rlhf"))
                # Arcs: with them a line is reached where one ends.
                found.setdefault(place, set()).update(line for line in data.lines(name) or ())
                found.setdefault(f"{place}:arcs", set()).update(_packed(*arc) for arc in data.arcs(name) or ())
    return found


_WIDE = 1 << 20


def _packed(start: int, end: int) -> int:
    return (abs(start) * _WIDE + abs(end)) if start > 0 else -1


def wanted(source: str) -> set[int]:
    """First lines of the statements inside of functions: what an import does not run."""
    lines: set[int] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = [each for each in function.body if not _text(each)]
            lines.update(each.lineno for top in body for each in ast.walk(top) if isinstance(each, ast.stmt))
    return {line for line in lines if not _silent(source.splitlines()[line - 1])}


def _text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _silent(line: str) -> bool:
    """What makes no bytecode of its own."""
    return line.strip() in ("...", "try:", "else:") or line.strip().startswith(("global ", "nonlocal "))


@dataclass(frozen=True, slots=True)
class Branch:
    """A choice between CPU and GPU."""

    line: int
    text: str
    goes: tuple[int, ...]
    """Lines of which one follows where the GPU's side is taken; of an expression, its own line."""
    avoids: tuple[int, ...] = ()
    """For an `if` without an else whose GPU side is to go on: lines that must not be all that follows."""


def branches(source: str) -> list[Branch]:
    """The choices between CPU and GPU in a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.If, ast.IfExp)) or not _ABOUT_GPUS.search(ast.unparse(node.test)):
            continue
        text = ast.unparse(node.test)
        if isinstance(node, ast.IfExp):
            found.append(Branch(node.lineno, text, (node.lineno,)))
        elif on_gpu(node.test):
            found.append(Branch(node.lineno, text, (node.body[0].lineno,)))
        elif node.orelse:
            found.append(Branch(node.lineno, text, (node.orelse[0].lineno,)))
        else:
            found.append(Branch(node.lineno, text, (), (node.body[0].lineno,)))
    return found


def on_gpu(test: ast.expr) -> bool:
    """Whether the condition holds on a GPU; else it holds on a CPU."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not on_gpu(test.operand)
    if isinstance(test, ast.BoolOp):
        return on_gpu(next(each for each in test.values if _ABOUT_GPUS.search(ast.unparse(each))))
    text = ast.unparse(test)
    if isinstance(test, ast.Compare) and text.endswith("None"):  # there is something of a GPU's, or there is not
        return isinstance(test.ops[0], ast.IsNot)
    about_cpu = bool(re.search(r"_cpu\b|'cpu'", text))
    differs = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.NotEq, ast.IsNot))
    return about_cpu == differs


def untaken(source: str, lines: set[int], arcs: set[int]) -> list[Branch]:
    """The choices whose GPU side no test took."""
    return [branch for branch in branches(source) if not _taken(branch, lines, arcs)]


def _taken(branch: Branch, lines: set[int], arcs: set[int]) -> bool:
    if branch.goes:
        return any(line in lines for line in branch.goes)
    after = {arc % _WIDE for arc in arcs if arc >= 0 and arc // _WIDE == branch.line}
    return bool(after - set(branch.avoids) - {branch.line})

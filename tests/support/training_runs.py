"""Whole runs for the tests: a tiny model, a task, `slurm-rlhf train` as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from glossary import unexplained
from kit_gpus import visible
from sums_task import REWARD, TINY, sums, toml
from tiny_models import make_tiny
from waiting import HANG_S, until
from warm_runs import WarmRun, commands

MPIRUN = str(Path(sys.executable).with_name("mpirun"))
COMMAND = [sys.executable, "-c", "import sys; from slurm_rlhf.cli.main import main; sys.exit(main())", "train"]

CONFIG = {
    **TINY,
    "rollout.batch_size": 8,
    "rollout.n_samples_per_prompt": 4,
    "train.batch_size": 16,
    "train.max_steps": 4,
    "train.max_epochs": 2,
    "eval.dataset": "eval.jsonl",
}


def workspace(path: Path, reward: str = REWARD) -> Path:
    """A directory with model, data, reward function and configuration; returns the configuration file."""
    path.mkdir(parents=True, exist_ok=True)
    make_tiny(path / "model", tied=True, hidden=128, heads=4, kv_heads=2)
    rows = sums()
    (path / "prompts.jsonl").write_text("".join(rows[:120]))
    (path / "eval.jsonl").write_text("".join(rows[120:]))
    (path / "reward.py").write_text(reward)
    (path / "run.toml").write_text(toml(CONFIG))
    return path / "run.toml"


class Run:
    """One `slurm-rlhf train` in a session of its own."""

    def __init__(
        self, config: Path, run_dir: Path, *overrides: str, command: Sequence[str] = COMMAND, warm: bool = False
    ) -> None:
        """`warm`: its processes are forked from one that has imported the libraries."""
        self.run_dir = run_dir
        words = [*command, str(config), f"--run_dir={run_dir}", *overrides]
        self.process: Any
        if warm and not visible():
            self.process = WarmRun(words, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
            return
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible()},
            umask=0,  # everybody may write everything
        )

    def wait(self) -> tuple[int, str]:
        """(exit code, what it printed), once all that it started has ended; AssertionError when it hangs."""
        try:
            output, _ = self.process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {HANG_S:.0f} s:\n{self.log()}") from None
        self.assert_gone()
        return self.process.returncode, output

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl has a line for `step`."""
        self.wait_until(lambda: len(metrics(self.run_dir)) >= step, f"step {step}")

    def wait_for_file(self, pattern: str, known: Collection[Path] = ()) -> None:
        """Wait until a file that matches `pattern` and is not `known` exists in the run directory."""
        self.wait_until(lambda: any(path not in known for path in self.run_dir.glob(pattern)), pattern)

    def wait_for_log(self, text: str) -> None:
        """Wait until the conductor's log holds `text`."""
        self.wait_until(lambda: text in self.log(), f"{text!r} in the log")

    def wait_until(self, ready: Callable[[], Any], what: str) -> None:
        """Wait until `ready`; AssertionError when the run has ended before."""
        until(lambda: ready() or self.process.poll() is not None, what, 0.05)
        if not ready():
            raise AssertionError(f"the run ended before {what}:\n{self.process.communicate()[0]}")

    def log(self) -> str:
        """The conductor's log so far."""
        return "".join(path.read_text() for path in (self.run_dir / "logs").glob("conductor.*.log"))

    def ranks(self, role: str = "") -> list[int]:
        """Process ids of the run's torchruns and workers (of `role` only, if one is named)."""
        return [
            pid for pid, line in _command_lines() if f"--run_dir={self.run_dir}" in line and f"--role={role}" in line
        ]

    def worker(self, role: str) -> int:
        """Process id of the only rank of `role`."""
        (found,) = self.workers(role)
        return found

    def workers(self, role: str) -> list[int]:
        """Process ids of the ranks of `role`; their torchrun has the role in its command line, too."""
        words = (f"--run_dir={self.run_dir}", f"--role={role}")
        return [pid for pid, line in _command_lines() if all(word in line for word in words) and is_worker(line)]

    def assert_gone(self) -> None:
        """All processes that the conductor started end."""
        until(lambda: not self.ranks(), "end of what the run started", 0.1)

    def end(self) -> None:
        """End whatever is left of it, by process id."""
        for pid in [self.process.pid, *self.ranks()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@contextmanager
def started(
    config: Path, run_dir: Path, *overrides: str, command: Sequence[str] = COMMAND, warm: bool = False
) -> Iterator[Run]:
    """A run that does not outlive the block."""
    run = Run(config, run_dir, *overrides, command=command, warm=warm)
    try:
        yield run
    finally:
        run.end()


def train(
    config: Path,
    run_dir: Path,
    *overrides: str,
    command: Sequence[str] = COMMAND,
    warm: bool = False,
) -> tuple[int, str]:
    """A whole run: (exit code, what it printed)."""
    with started(config, run_dir, *overrides, command=command, warm=warm) as run:
        return run.wait()


def finished(config: Path, run_dir: Path, *overrides: str, command: Sequence[str] = COMMAND) -> str:
    """A whole run that succeeds, its processes forked; what it printed."""
    code, output = train(config, run_dir, *overrides, command=command, warm=True)
    assert code == 0, output
    return output


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; docs/metrics.md explains each name in them."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert unexplained({name for row in rows for name in row}) == []
    return rows


def steps(run_dir: Path) -> int:
    """Count the steps that the run has done."""
    return len(metrics(run_dir))


def saved(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are complete."""
    names = [path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*")]
    return sorted(int(name) for name in names if name.isdigit())


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def timeless(rows: list[dict[str, Any]]) -> list[str]:
    """Metrics without what a clock measured, as text: bit for bit."""
    return [json.dumps({k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))}) for row in rows]


def assert_close_metrics(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same steps with the same samples, and numbers that differ by what the order of summation makes of them."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    measured = ("time/", "perf/", "rollout_logprob_diff")  # times, rates, and a difference by rounding
    for ours, theirs in zip(rows, expected, strict=True):
        for name, value in theirs.items():
            if not name.startswith(measured):
                # Engine and actor agree to rounding, so what they differ by has no digits that could be equal.
                least = 1e-5 if name.startswith("correction/log_rho") else 1e-6
                found = ours[name]
                assert found == pytest.approx(value, rel=1e-5, abs=least), f"{name} of step {ours['step']}: {found}"


def is_worker(line: str) -> bool:
    """Whether a command line is that of a rank, and not of what starts one and has its command in its own."""
    starters = ("slurm_rlhf.ranks.torchrun", "slurm_rlhf.nodes.")
    return "-m slurm_rlhf.ranks.rank_process" in line and not any(starter in line for starter in starters)


def _command_lines() -> Iterator[tuple[int, str]]:
    forked = commands()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            # A process that has ended but was not waited for yet has an empty command line.
            line = words.replace(b"\0", b" ").decode(errors="replace")
            yield int(entry.name), forked.get(int(entry.name), line) if line else line


def mpirun(processes: int, command: Sequence[str] = COMMAND) -> list[str]:
    """The beginning of a command, `mpirun -np N slurm-rlhf train`; more processes than cores are meant."""
    program = MPIRUN if Path(MPIRUN).exists() else shutil.which("mpirun") or "mpirun"
    return [program, "-np", str(processes), "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", *command]

"""Run a command of a stage in a session of its own, with a time limit, and read what it has measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiny_models import make_tiny
from waiting import HANG_S

ROOT = Path(__file__).parents[2]
VLLM_ON_CPU = {
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    **{"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
}


@contextmanager
def started(command: list[str], cwd: Path, extra: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that does not outlive the block."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(extra or {})}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(command: list[str], cwd: Path, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with started(command, cwd, extra) as process:
        try:
            out, err = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def make_sums(directory: Path) -> None:
    """Write a model, and the sums of two digits as examples."""
    make_tiny(directory / "model")
    rows = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(10) for b in range(10)]
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(record: Path) -> list[dict[str, float]]:
    """Metrics of a stage without what a clock measured."""
    file = record / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def timeless_metrics(record: Path) -> list[str]:
    """The same as text: bit for bit."""
    return [json.dumps(row) for row in metrics(record)]

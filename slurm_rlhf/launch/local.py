"""One machine: every role is a torchrun of its own in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cluster.launcher import Ended
from slurm_rlhf.launch.torchrun import TorchrunPlan, command

WORKER_MODULE = "slurm_rlhf.roles.worker"


@dataclass(slots=True)
class _Started:
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    reported: bool = False


class LocalLauncher:
    """Starts torchruns as children of this process; implements `cluster.launcher.Launcher`."""

    def __init__(self, run_dir: Path, node: str) -> None:
        self._run_dir = run_dir
        self._node = node
        self._started: list[_Started] = []

    def start(self, role: str, processes: int, arguments: list[str], environment: Mapping[str, str]) -> None:
        log = self._run_dir / "logs" / f"{role}.{self._node}.torchrun.log"
        plan = TorchrunPlan(
            role, processes, f"{self._run_dir.name}.{os.getpid()}", str(self._run_dir / ".control" / "torchrun")
        )
        with open(log, "ab") as out:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "slurm_rlhf.launch.shim",
                    str(os.getpid()),
                    *command(plan, WORKER_MODULE, arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._started.append(_Started(role, process, log))

    def ended(self) -> list[Ended]:
        news = []
        for item in self._started:
            code = item.process.poll()
            if code is not None and not item.reported:
                item.reported = True
                news.append(Ended(item.role, self._node, code, item.log))
        return news

    def running(self) -> int:
        return sum(item.process.poll() is None for item in self._started)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        # torchrun's workers hold a parent-death signal, so they go with it although they are sessions of their own.
        self._signal(signal.SIGKILL)
        for item in self._started:
            item.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for item in self._started:
            if item.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(item.process.pid, number)

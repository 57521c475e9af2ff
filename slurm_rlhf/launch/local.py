"""One machine: every role is a torchrun of its own in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.launch.exec_shim import shimmed
from slurm_rlhf.launch.gpu_visibility import visibility
from slurm_rlhf.launch.launcher import Ended, exit_text
from slurm_rlhf.launch.step_spec import StepOrder, torchrun_command
from slurm_rlhf.placement.rank_map_file import RankMap
from slurm_rlhf.polling import wait_until


@dataclass(slots=True)
class _Started:
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    reported: bool = False


class LocalLauncher:
    """Starts torchruns as children of this process; implements `cluster.launcher.Launcher`."""

    def __init__(self, run_dir: Path, ranks: RankMap) -> None:
        self._run_dir = run_dir
        self._ranks = ranks
        self._node = ranks.topology.nodes[0].name
        self._started: list[_Started] = []

    @property
    def address(self) -> str:
        return "127.0.0.1"

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        log = self._run_dir / "logs" / f"{role}.{self._node}.torchrun.log"
        order = StepOrder(role, str(self._run_dir), f"{self._run_dir.name}.{os.getpid()}", arguments, environment)
        torchrun_logs = str(self._run_dir / ".control" / "torchrun")
        slots = self._ranks.roles[role][0].gpus
        # The map's own devices are what CUDA_VISIBLE_DEVICES left to this process; there is no step to ask.
        shown, hidden = visibility(self._ranks.topology, self._node, slots, {})
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        with open(log, "ab") as out:
            process = subprocess.Popen(
                shimmed(torchrun_command(order, self._ranks, self._node, torchrun_logs)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment[self._node], **shown},
                start_new_session=True,
            )
        self._started.append(_Started(role, process, log))

    def ended(self) -> list[Ended]:
        news = []
        for item in self._started:
            code = item.process.poll()
            if code is not None and not item.reported:
                item.reported = True
                news.append(Ended(item.role, self._node, exit_text(code), item.log))
        return news

    def stop(self, done: bool, grace_s: float) -> None:
        if not done:
            self._signal(signal.SIGTERM)
            self._wait_gone(grace_s)
        # Where all is done, taking torchrun down in style would only cost seconds. Its workers hold a parent-death
        # signal, so they go with it although they are sessions of their own.
        self._signal(signal.SIGKILL)
        for item in self._started:
            item.process.wait()

    def _wait_gone(self, seconds: float) -> None:
        wait_until(lambda: not any(item.process.poll() is None for item in self._started), seconds, 0.02, 0.02)

    def _signal(self, number: signal.Signals) -> None:
        for item in self._started:
            if item.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(item.process.pid, number)

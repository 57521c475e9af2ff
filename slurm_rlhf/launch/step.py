"""One `srun` as a child process: what it says of its tasks, and how it is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from slurm_rlhf.launch.exec_shim import shimmed
from slurm_rlhf.launch.launcher import exit_text
from slurm_rlhf.launch.srun import Step, step_command, step_environment

_TASK_ENDED = re.compile(r"^srun: error: (?P<nodes>[^\s:]+): tasks? [\d,-]+: (?P<how>.+)$", re.MULTILINE)
_STARTED_AGAIN = ("EADDRINUSE", "Unable to contact slurm controller", "Communication connection failure")
"""Failures that another attempt can mend: a port that somebody else has, a controller that is being restarted."""


class RunningStep:
    """A step of the job. `log` takes what srun itself says; what tasks say goes to `step.output`."""

    def __init__(self, step: Step, command: list[str], log: Path) -> None:
        self.step = step
        self.log = log
        self._command = step_command(step, command)
        self._marks: dict[Path, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it anew. Call it from a thread that lives as long as the step is to."""
        self._marks = {path: _size(path) for path in self._files()}
        with open(self.log, "ab") as out:
            self._process = subprocess.Popen(
                # SIGTERM makes srun end its tasks. Killed outright, it would leave them to the end of the job.
                shimmed(self._command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=step_environment(os.environ),
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Exit status of srun, None while it runs."""
        return None if self._process is None else self._process.poll()

    def failures(self) -> list[tuple[str, str]]:
        """(nodes, how) of the tasks that failed, in order, or that srun itself is gone; empty while all is well."""
        found = [(match["nodes"], f"ended: {match['how']}") for match in _TASK_ENDED.finditer(self._said(self.log))]
        if found or self.code is None:
            return found
        return [(",".join(self.step.nodes), f"ended (srun {exit_text(self.code)})")]

    def worth_another_try(self) -> bool:
        """True when it failed for a reason that need not be there the next time."""
        said = "".join(self._said(path) for path in self._files())
        return any(mark in said for mark in _STARTED_AGAIN)

    def signal(self, number: signal.Signals) -> None:
        """Signal srun, if it is still there: SIGTERM makes it kill its tasks."""
        if self._process is not None and self.code is None:
            self._process.send_signal(number)

    def _files(self) -> list[Path]:
        return [self.log, Path(self.step.output.replace("%N", self.step.nodes[0]))]

    def _said(self, path: Path) -> str:
        """What `path` has got since the start."""
        try:
            with path.open("rb") as file:
                file.seek(self._marks.get(path, 0))
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

"""Start an agent on each node: by a step of the Slurm job, or here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.child_process import bound_to_parent
from slurm_rlhf.nodes.facts import Orders
from slurm_rlhf.nodes.srun import AGENT, HOST, Container, Step, step_command, step_environment
from slurm_rlhf.wire import timeouts


class Starter(Protocol):
    """Start the agents of one examination, which calls all of this from one thread. Nothing blocks for long."""

    def start(self, orders: Orders) -> None:
        """Start an agent on every node. Raises RunError if that is not even begun."""

    def said(self) -> tuple[str, str]:
        """Return what the agents printed, and the errors of what started them."""

    def over(self) -> bool:
        """Tell whether all agents have ended."""

    def end(self) -> None:
        """End them, within seconds."""


class CommandStarter:
    """Start a command that starts the agents and lasts as long as they do."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[IO[bytes], IO[bytes]] | None = None

    def start(self, orders: Orders) -> None:
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        out, err = self._files
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self._environment, **orders.to_environment()},
            )
        except OSError as error:
            raise RunError(
                f"{self._command[0]} cannot be started: {error}. The batch script needs Slurm's commands on its PATH"
            ) from None

    def said(self) -> tuple[str, str]:
        if self._files is None:
            return "", ""
        out, err = (os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in self._files)
        return out, err

    def over(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()  # srun ends its tasks
            try:
                self._process.wait(timeouts.PREFLIGHT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for file in self._files or ():
            file.close()


def by_srun(nodes: Sequence[str], container: Container = HOST, gpus: Sequence[int] = ()) -> CommandStarter:
    """Start the agents by one step over `nodes`; `gpus`: the number on each, for the step."""
    step = Step(
        "preflight",
        tuple(nodes),
        gpus=tuple(gpus),
        together=False,
        uneven=len(set(gpus)) > 1,
        options=container.step_options(),
    )
    return CommandStarter(step_command(step, container.command(AGENT, gpus=bool(gpus))), step_environment(os.environ))


def here() -> CommandStarter:
    """Start one agent, on this machine."""
    return CommandStarter(bound_to_parent([sys.executable, "-m", AGENT]), os.environ)

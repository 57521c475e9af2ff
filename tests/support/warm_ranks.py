"""Processes that are a worker again and again: the libraries are imported once, the lives are whole.

Run as a program, this file is such a process: each line of the pipe it is given is the arguments of one worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rollout_zygote import Zygote


class LifeOver(BaseException):
    """In place of the end of the process."""


class WarmRank:
    """The test's handle of such a process, with `environment` as torchrun would give it."""

    def __init__(self, zygote: Zygote, pipe: Path, **environment: str) -> None:
        os.mkfifo(pipe)
        torchrun = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        torchrun |= {"TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}
        self.rank = zygote.fork([str(pipe)], torchrun | environment, __file__)
        self._pipe = open(pipe, "w", encoding="utf-8")  # noqa: SIM115

    def live(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Begin a life, after the one before."""
        self._pipe.write(json.dumps([arguments, environment]) + "\n")
        self._pipe.flush()

    def end(self) -> None:
        self.rank.send_signal(signal.SIGKILL)
        self._pipe.close()


def _over(code: int) -> None:
    raise LifeOver(code)


def _main(pipe: str) -> None:
    from slurm_rlhf.workers import main as worker

    leave: Any = os._exit
    for line in open(pipe, encoding="utf-8"):  # noqa: SIM115
        arguments, environment = json.loads(line)
        os.environ.update(environment)
        sys.argv = ["worker", *arguments]
        os._exit = _over  # type: ignore[assignment]
        try:
            worker.main()
        except LifeOver as over:
            if over.args[0]:
                leave(1)
        finally:
            os._exit = leave


if __name__ == "__main__":
    _main(sys.argv[1])

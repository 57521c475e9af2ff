"""Processes that are a worker again and again: the libraries are imported once, the lives are whole.

Run as a program, this file is such a process: each line of its input is the arguments of one `roles.worker`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class LifeOver(BaseException):
    """In place of the end of the process."""


class WarmRank:
    """The test's handle of such a process, with `environment` as torchrun would give it."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "GLOO_SOCKET_IFNAME": "lo",
                "VLLM_HOST_IP": "127.0.0.1",
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                **environment,
            },
        )

    def live(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Begin a life, after the one before."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([arguments, environment]) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _over(code: int) -> None:
    raise LifeOver(code)


def _main() -> None:
    from slurm_rlhf.roles import engine_rank, worker

    def once() -> None:
        if "vllm" not in sys.modules:
            prepare()

    prepare, engine_rank.prepare_environment = engine_rank.prepare_environment, once
    leave: Any = os._exit
    for line in sys.stdin:
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
    _main()

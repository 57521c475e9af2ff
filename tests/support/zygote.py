"""Starts ranks by forking: torch, transformers and vLLM are imported once, and not in each.

Run as a program, this file is the process that forks: it reads [request, details] lines and answers the process id of
each rank. A warm rank is a worker again and again: each line of the pipe that it is given is the arguments of one life.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Zygote:
    """The test's handle of the program."""

    def __init__(self, *modules: str) -> None:
        """`modules`: what else to import."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "VLLM_HOST_IP": "127.0.0.1",
            },
        )

    def fork(self, arguments: list[str], environment: dict[str, str], script: str) -> Rank:
        """A rank that runs `script` (empty: the worker's module) with `arguments`."""
        return Rank(self, int(self.ask("fork", arguments, environment, script)))

    def ask(self, *request: Any) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def end(self) -> None:
        """With all of its ranks, who die with their parent."""
        self.process.kill()
        self.process.wait()


class Rank:
    """As `subprocess.Popen`, as far as needed."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                self._code = int(self._zygote.ask("wait", self.pid))
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


WARM = "warm"
"""In place of a script: be a worker again and again."""


class LifeOver(BaseException):
    """In place of the end of a warm rank's process."""


class WarmRank:
    """The test's handle of a rank that lives on, with `environment` as torchrun would give it."""

    def __init__(self, zygote: Zygote, pipe: Path, **environment: str) -> None:
        os.mkfifo(pipe)
        torchrun = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        torchrun |= {"TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}
        self.rank = zygote.fork([str(pipe)], torchrun | environment, WARM)
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


def _live_again_and_again(pipe: str) -> None:
    from slurm_rlhf.ranks import rank_process as worker

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


def _child(arguments: list[str], environment: dict[str, str], script: str) -> None:
    from slurm_rlhf.ranks import rank_process as worker

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ.update(environment)
    sys.argv = ["worker", *arguments]
    if script == WARM:
        _live_again_and_again(arguments[0])
    elif script:
        runpy.run_path(script, run_name="__main__")
    else:
        worker.main()


def _main() -> None:
    from slurm_rlhf.engine.vllm import prepare_environment

    prepare_environment()
    import vllm.entrypoints.llm  # noqa: F401

    import slurm_rlhf.ranks.engine_leader  # noqa: F401
    from slurm_rlhf.engine._vllm import tp_executor

    tp_executor("", int)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        request, *details = json.loads(line)
        if request == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(details[0], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                try:
                    _child(*details)
                finally:
                    os._exit(1)
        print(answer, flush=True)


if __name__ == "__main__":
    _main()

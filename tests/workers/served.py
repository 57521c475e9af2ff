"""Methods that the workers of these tests serve: well behaved ones, and every way to go wrong."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Any


class Served:
    """Is made in each worker; `kept` lives as long as its process."""

    def __init__(self, mark: str = "", slow_s: float = 0.0, fails: str = "") -> None:
        time.sleep(slow_s)
        if fails:
            raise ValueError(fails)
        self.mark = mark
        self.kept: list[Any] = []

    def double(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    def keep(self, value: Any) -> list[Any]:
        self.kept.append(value)
        return [os.getpid(), *self.kept]

    def wait(self, path: str) -> bool:
        while not os.path.exists(path):
            time.sleep(0.01)
        return True

    def say(self, text: str) -> None:
        print(text)

    def hang(self) -> None:
        print("about to hang", flush=True)
        time.sleep(1000)

    def crash(self) -> None:
        ctypes.string_at(0)

    def leave(self, status: int) -> None:
        if os.fork():
            os._exit(status)
        time.sleep(1000)  # and keeps the connection

    def stop(self) -> None:
        sys.exit(3)

    def grow(self) -> None:
        held = []
        while True:
            held.append(b"x" * (16 << 20))
            time.sleep(0.005)

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def garbage(self) -> Any:
        return object()

    def spawn(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    def fork(self, fails: bool) -> str:
        if os.fork() == 0 and fails:
            raise ValueError
        return "forked"

    def secrets(self) -> list[str]:
        return [name for name in os.environ if name.startswith("SLURM_RLHF_RUN")]

    def heavy(self) -> list[str]:
        return [name for name in ("torch", "numpy", "zmq") if name in sys.modules]

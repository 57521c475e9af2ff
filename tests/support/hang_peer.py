"""A rank in a process of its own that hangs on demand; it answers for its stacks as every rank does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.processes import print_to
from slurm_rlhf.errors import RoleDied
from slurm_rlhf.observe.stacks import late_s
from slurm_rlhf.ranks.worker import LATE, take_stacks
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient

INTERVAL = 0.2


def started(*words: object) -> subprocess.Popen[bytes]:
    """Start a rank; `words` are the arguments of `main`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, __file__, *map(str, words)], env=environment)


class HangPeers:
    """The part of a `nodes.launcher.Launcher` that is the same for every role of two such ranks."""

    address = "127.0.0.1"
    engines = None

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []

    def add(self, endpoint: str, role: str, rank: int, limit: float, log: Path) -> None:
        self.started.append(started(endpoint, self.directory.keys, role, rank, 2, limit, log))

    def ended(self) -> list[Any]:
        return []

    def stop(self, done: bool, grace_s: float) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def hold_the_lock(seconds: float) -> None:
    """Wait in C, where PyDLL keeps the lock; for a timer's file, because a signal ends `sleep`, and no read."""
    libc = ctypes.PyDLL(None)
    timer = libc.timerfd_create(1, 0)
    libc.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9)), None)
    libc.read(timer, ctypes.create_string_buffer(8), 8)
    libc.close(timer)


def work_in_python(seconds: float) -> None:
    time.sleep(seconds)


def start(total_steps: int) -> dict[str, Any]:
    return {"note": "", "parameters": None}


def main(endpoint: str, keys: str, role: str, rank: str, world: str, limit: str, log: str, host: str = "n1") -> None:
    print_to(Path(log))
    client = ControlClient(
        endpoint,
        RunKeys.load(keys),
        role,
        int(rank),
        int(world),
        host=host,
        heartbeat_interval=INTERVAL,
        heartbeat_limit=float(limit),
        on_beat=partial(LATE.put_off, late_s(float(limit))),
        threaded={"stacks": take_stacks},
    )
    while (request := client.receive()) is not None:
        request.reply(globals()[request.method](request.argument()))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RoleDied:
        sys.exit(3)

"""The program of a worker: makes one object, and calls its methods as the pool asks, one call after the other.

`python -m slurm_rlhf.workers.process SOCKET STACK PARENT_PID TRACES` gets two descriptors: of the connection, and of
the file to which it writes its stack when it is asked by `stacks.SIGNAL`. TRACES: as `WorkerPool.traces`. Messages are
lines of JSON, because rows of data have integers of any size, and texts that are no valid Unicode. The first names the
object's class and its arguments. A call of it is `[method, arguments]`, its answer `{"value": ...}` or
`{"raised": text}`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from slurm_rlhf.cluster.processes import die_with_parent
from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.observe.stacks import SIGNAL
from slurm_rlhf.user_files import text_of

LARGEST = 1 << 28
"""Bytes of a message at most."""


class Channel:
    """Sends and receives plain values; arrays and tensors arrive as lists."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self._lines = connected, connected.makefile("rb")

    def send(self, value: Any) -> None:
        """Send a value. Raises TypeError or ValueError for one that has no JSON or is too large, and OSError."""
        text = packed(value).encode() + b"\n"
        if len(text) > LARGEST:
            raise ValueError(f"a message of {len(text) / 2**20:.0f} MiB; {LARGEST / 2**20:.0f} MiB are the most")
        self.socket.sendall(text)

    def receive(self) -> Any:
        """Wait for a value; a part of one that came by the socket's time-out is lost.

        Raises TimeoutError, EOFError or ConnectionError when the other side has ended, ValueError for what is no value.
        """
        line = self._lines.readline(LARGEST)
        if not line.endswith(b"\n"):
            raise ValueError(f"a message of {len(line)} bytes") if line else EOFError
        return json.loads(line)

    def close(self) -> None:
        """Close this end."""
        self._lines.close()
        self.socket.close()


def packed(value: Any) -> str:
    """Write a value as JSON. Raises TypeError or ValueError for one that has none."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot go to another process: use plain values")


def main() -> None:
    """Serve until the pool closes its end."""
    die_with_parent(int(sys.argv[3]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()  # the stack of a crash, and of a call that is too late, goes to the log
    faulthandler.register(SIGNAL, file=int(sys.argv[2]), all_threads=False)  # others may run meanwhile
    channel, traces = Channel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[4])
    try:
        module, name, arguments = channel.receive()
        served: list[Any] = []
        _answer(channel, lambda: served.append(getattr(importlib.import_module(module), name)(**arguments)), traces > 1)
        while served:
            method, given = channel.receive()
            _answer(channel, lambda: getattr(served[0], method)(*given), traces > 0)  # noqa: B023 called at once
    except (EOFError, ConnectionError):
        pass


def _answer(channel: Channel, work: Callable[[], Any], traced: bool) -> None:
    pid = os.getpid()
    try:
        value = work()
        _leave_unless(pid)
        channel.send({"value": value})
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        _leave_unless(pid)
        if traced and (not isinstance(error, SlurmRlhfError) or error.__cause__ is not None):  # else one line says all
            traceback.print_exception(error)
        channel.send({"raised": str(error) if isinstance(error, SlurmRlhfError) else text_of(error)})
    sys.stdout.flush()


def _leave_unless(pid: int) -> None:
    """End a process that the user's code has forked and that has come back: two answers to a call shift all others."""
    if os.getpid() != pid:
        os._exit(0)


if __name__ == "__main__":
    main()

"""The stacks of a rank: on request, and into its log while something holds the interpreter's lock.

A thread answers the request, so a main thread that hangs does not matter, as long as Python runs at all. A call into C
that keeps the interpreter's lock stops every thread. For that, a timer of the kernel is started anew with each
heartbeat: when heartbeats stop, it interrupts the main thread, which writes its stack through the log's descriptor,
open already, and needs no lock for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from slurm_rlhf.cluster.processes import node_load
from slurm_rlhf.observe.stacks import LateStacks, own_stacks, written
from slurm_rlhf.wire.calls import StacksAnswer

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Variable with the beginning of the name of a pipe: what comes through it makes NCCL's flight recorder write."""

_LATE = LateStacks()
_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def expect_beat(within_s: float) -> None:
    """Write the main thread's stack to standard error unless this is called again within so many seconds."""
    _LATE.put_off(within_s)


def expect_none() -> None:
    """Stop what `expect_beat` has started: no more heartbeats are due."""
    _LATE.stop()


def record_flights(control: Path, role: str) -> None:
    """Let NCCL's flight recorder open a pipe below `control`; to be called before the first process group is made.

    Torch ends a process that cannot make its pipe, so this tries whether the file system takes one.
    """
    if PIPE in os.environ or not any(Path(device).exists() for device in _DEVICES):
        return
    tried = control / f".{os.getpid()}.pipe"
    with contextlib.suppress(OSError):
        os.mkfifo(tried)
        tried.unlink()
        os.environ[PIPE] = str(control / f"flights.{role}.")


def answer() -> StacksAnswer:
    """Say where this process stands. Where NCCL runs, its flight recorder writes its file as well."""
    _ask_recorder()
    return StacksAnswer(written(own_stacks()), node_load())


def _ask_recorder() -> None:
    """Write to the recorder's pipe, which is there only in a process whose groups are NCCL's."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    name = f"{os.environ.get(PIPE, '')}{torch.distributed.get_rank()}.pipe"
    with contextlib.suppress(OSError):
        pipe = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"1")
        finally:
            os.close(pipe)

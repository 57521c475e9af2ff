"""The base class of every rank of every role: it answers the calls that its role declares. And a rank's stacks.

A thread answers the call for stacks, so a main thread that hangs does not matter, as long as Python runs at all. A call
into C that keeps the interpreter's lock stops every thread. For that, a timer of the kernel is started anew with each
heartbeat: when heartbeats stop, it interrupts the main thread, which writes its stack through the log's descriptor,
which is open already, and needs no lock for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.processes import node_load
from slurm_rlhf.config.schema import Config
from slurm_rlhf.observe.stacks import LateStacks, own_stacks, written
from slurm_rlhf.wire.calls import DeviceReport, RankCalls, StacksAnswer
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.codec import calls_of
from slurm_rlhf.wire.messages import Request

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Variable with the beginning of the name of a pipe: what comes through it makes NCCL's flight recorder write."""

TRACE = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the beginning of the name of the file that it writes."""

LATE = LateStacks()
"""Writes the main thread's stack to standard error if heartbeats stop."""

_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def record_flights(control: Path, info: RankInfo) -> None:
    """Let NCCL's flight recorder open a pipe below `control`; to be called before the first process group is made.

    Torch ends a process that cannot make its pipe, so this tries whether the file system takes one. It appends the rank
    in the first process group: 0 in every engine, so names of pipe and trace have the rank in the role.
    """
    if TRACE in os.environ:
        os.environ[TRACE] += f"{info.rank}."
    if PIPE in os.environ or not any(Path(device).exists() for device in _DEVICES):
        return
    tried = control / f".{os.getpid()}.pipe"
    with contextlib.suppress(OSError):
        os.mkfifo(tried)
        tried.unlink()
        os.environ[PIPE] = str(control / f"flights.{info.role}.{info.rank}.")


def take_stacks() -> StacksAnswer:
    """Return the stacks of this process and the load of its node. NCCL's flight recorder writes its file as well."""
    _ask_recorder()
    return StacksAnswer(written(own_stacks()), node_load())


def _ask_recorder() -> None:
    """Write to the recorder's pipe, which is there only in a process whose groups are NCCL's."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    name = f"{os.environ.get(PIPE, '')}{torch.distributed.get_rank()}.pipe"
    with contextlib.suppress(OSError), open(os.open(name, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as pipe:
        pipe.write(b"1")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Says who a rank is."""

    role: str
    rank: int  # within its role
    world: int  # ranks of the role
    local_rank: int  # on its node: which of the visible accelerators is its own
    node: str


class Worker(RankCalls):
    """Answers the calls of a rank. Subclasses implement a class of `wire.calls`."""

    def __init__(self, config: Config, info: RankInfo, client: ControlClient) -> None:
        self.config = config
        self.info = info
        self.client = client

    def attention(self) -> str:
        """Return the attention kernel that this rank uses; empty: it has none, or none was used yet."""
        return ""

    def memory(self) -> DeviceReport:
        import torch

        if not torch.cuda.is_available():
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            return DeviceReport(used=pages * os.sysconf("SC_PAGE_SIZE"))
        free, total = torch.cuda.mem_get_info()
        return DeviceReport(
            gpu=torch.cuda.get_device_name(),
            total=int(total),
            used=int(total - free),
            attention=self.attention(),
        )

    def stacks(self) -> StacksAnswer:
        return take_stacks()

    def shutdown(self) -> str:
        self.close()
        return "done"

    def handle(self, request: Request) -> None:
        """Answer one call. An exception of the method goes to the caller, and does not end this process."""
        try:
            spec = calls_of(type(self))[request.method]
            arguments = [] if spec.argument is None else [request.argument(spec.argument)]
            answer = self.perform(getattr(self, spec.name), arguments)
            if isinstance(answer, Future):
                answer.add_done_callback(lambda done: request.answer_with(done.result))
            else:
                request.reply(answer)
        except Exception as error:
            request.fail(error)

    def perform(self, method: Callable[..., Any], arguments: list[Any]) -> Any:
        """Call `method`, which may return a Future: the answer is sent when it resolves."""
        return method(*arguments)

    def busy(self) -> bool:
        """Return True while `advance` has something to do: then nobody waits for the next call."""
        return False

    def advance(self) -> None:
        """Do a small piece of its own work between two calls."""

    def close(self) -> None:
        """Release what outlives a process: shared memory, sockets, groups."""

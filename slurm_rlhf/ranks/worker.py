"""The base class of every rank of every role: it answers the calls that its role declares."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.ranks.own_stacks import answer
from slurm_rlhf.wire.calls import DeviceReport, RankCalls, StacksAnswer
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.declarations import calls_of
from slurm_rlhf.wire.messages import Request


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

    def about(self) -> DeviceReport:
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return DeviceReport(torch.cuda.get_device_name(), int(total), int(total - free), self.attention())
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return DeviceReport("", 0, pages * os.sysconf("SC_PAGE_SIZE"), "")

    def stacks(self) -> StacksAnswer:
        return answer()

    def shutdown(self) -> str:
        self.close()
        return "done"

    def handle(self, request: Request) -> None:
        """Answer one call. What the method raises goes to the caller, not to the end of this process."""
        try:
            spec = calls_of(type(self)).get(request.method)
            if spec is None:
                known = ", ".join(sorted(calls_of(type(self))))
                raise RunError(f"{self.info.role} has no call {request.method!r}; its calls: {known}")
            arguments = [] if spec.argument is None else [request.argument(spec.argument)]
            answer = self.perform(getattr(self, spec.name), arguments)
            if isinstance(answer, Future):
                answer.add_done_callback(partial(_settle, request))
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


def _settle(request: Request, answer: Future[Any]) -> None:
    """Answer a call with what its Future has brought."""
    error = answer.exception()
    try:
        if error is None:
            request.reply(answer.result())
    except Exception as refused:
        error = refused
    if error is not None:
        request.fail(error)

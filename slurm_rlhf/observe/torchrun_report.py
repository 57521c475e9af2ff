"""Reads torchrun's report of the process that failed first."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANK = re.compile(r"^  rank\s*: (?P<rank>\d+) \(local_rank: \d+\)$", re.MULTILINE)
_CODE = re.compile(r"^  exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)", re.MULTILINE)
_READ = 1 << 16  # bytes from the end that are looked at: the report is torchrun's last word

_OFTEN = {
    "SIGKILL": " (often: the node's or the job's memory was full; lower vllm.cpu_kvcache_gib or the ranks on a node, "
    "or ask for --mem=0)",
    "SIGBUS": " (often: /dev/shm was full)",
}
"""Signal -> its usual cause, for a process that nobody ended on purpose."""


@dataclass(frozen=True, slots=True)
class FailedProcess:
    """The process of a torchrun that failed first."""

    rank: int  # in the world of its torchrun
    pid: int
    exitcode: int  # negative: the signal that ended it

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.exitcode >= 0:
            return f"ended with status {self.exitcode}"
        try:
            name = signal.Signals(-self.exitcode).name
        except ValueError:
            name = f"signal {-self.exitcode}"
        return f"was killed by {name}{_OFTEN.get(name, '')}"


def first_failure(log: Path, start: int = 0) -> FailedProcess | None:
    """The root cause in the newest report in `log` behind byte `start`; None where there is none, or no such file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - _READ))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return None
    _, found, report = text.rpartition(_ROOT_CAUSE)
    rank, code = _RANK.search(report), _CODE.search(report)
    if not found or rank is None or code is None:
        return None
    return FailedProcess(int(rank["rank"]), int(code["pid"]), int(code["code"]))

"""Find what ended a process: in the last lines of its log, and in the report of torchrun."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.errors import system_cause

_READ = 1 << 16  # bytes from the end

# Output of torchrun and c10d when a process ends, which hides the line with the reason.
_NOISE = re.compile(
    r"\*{20,}$"
    r"|Setting OMP_NUM_THREADS environment variable"
    r"|[IWE]\d{4} [\d:.]+ \d+ torch/distributed/elastic/"
    r"|(\[rank\d+\]:)?\[W\d{4,} .*(socket|TCPStore|ProcessGroup\w*|CUDAAllocatorConfig)\.cpp"
    r"|frame #\d+: "
    r"|Exception raised from .* at .*\.[ch]pp:\d+ "
    r"|(\[rank\d+\]:)?\[W\d{4,} .* deprecated\b"
)
_WARNING = re.compile(r".*:\d+: (Future|Deprecation|PendingDeprecation)Warning: ")
"""Python's deprecation warnings; the line of source may follow, indented by two blanks."""
_REPORT_BEGINS = re.compile(r"(torch\.distributed\.elastic\S*\.)?ChildFailedError:")
_REPORT_RULE = re.compile(r"={20,}$")
_TRACEBACK = "Traceback (most recent call last):"
_TORCHRUN_FRAME = re.compile(r'  File ".*torch/distributed/(run|launcher/api)\.py"')

_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANK = re.compile(r"^  rank\s*: (?P<rank>\d+) \(local_rank: \d+\)$", re.MULTILINE)
_CODE = re.compile(r"^  exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)", re.MULTILINE)


def tail(path: Path, lines: int, start: int = 0) -> list[str]:
    """Return the last `lines` lines of `path` that are not blank, or why it cannot be read.

    Reads nothing before byte `start`, which belongs to an earlier start of the run. Leaves out deprecation warnings and
    what torchrun adds when one of its processes ends, unless there is nothing else.
    """
    try:
        text = read_end(path, start)
    except OSError as error:
        return [f"({path} cannot be read: {error.strerror})"]
    found = [line.rstrip() for line in text.splitlines() if line.strip()]
    useful = list(_without_noise(found)) or found
    return useful[-lines:] or ["(it is empty)"]


def quoted(path: Path, lines: int, start: int = 0) -> str:
    """Quote the last `lines` lines of `path`, as `tail` finds them, with a known cause of such an end."""
    found = tail(path, lines, start)
    cause = system_cause("\n".join(found))
    return "\n".join([f"The last lines of {path}:", *(f"    {line}" for line in found), *filter(None, [cause])])


def _without_noise(lines: list[str]) -> Iterator[str]:
    """Drop warnings, torchrun's own traceback and its report."""
    traceback: list[str] = []  # lines of a traceback that may be torchrun's
    rules_left = 0  # rules that are left of the report that is skipped
    blamed = False  # the line before is a warning
    for line in lines:
        source, blamed = blamed and line.startswith("  "), bool(_WARNING.match(line))
        if source or blamed:
            continue
        if rules_left:
            rules_left -= bool(_REPORT_RULE.match(line))
        elif _REPORT_BEGINS.match(line) and any(_TORCHRUN_FRAME.match(frame) for frame in traceback):
            traceback, rules_left = [], 2
        elif not _NOISE.match(line):
            if line == _TRACEBACK or (traceback and not line.startswith(" ")):
                yield from traceback
                traceback = []
            if line == _TRACEBACK or traceback:
                traceback.append(line)
            else:
                yield line
    yield from traceback


def ends_in_error(lines: list[str]) -> bool:
    """Tell whether `lines` end with a traceback and a message of one line: its other lines are indented."""
    for line in reversed(lines[:-1]):
        if line == _TRACEBACK:
            return True
        if not line.startswith(" "):
            return False
    return False


@dataclass(frozen=True, slots=True)
class FailedProcess:
    """Identify the process of a torchrun which failed before the others."""

    rank: int  # in the process group of its torchrun
    pid: int
    exitcode: int  # negative: the signal that ended it


def first_failure(log: Path, start: int = 0) -> FailedProcess | None:
    """Return the root cause from the newest report of torchrun in `log` after byte `start`; None without one."""
    try:
        text = read_end(log, start)
    except OSError:
        return None
    _, found, report = text.rpartition(_ROOT_CAUSE)
    rank, code = _RANK.search(report), _CODE.search(report)
    if not found or rank is None or code is None:
        return None
    return FailedProcess(int(rank["rank"]), int(code["pid"]), int(code["code"]))


def read_end(path: Path, start: int = 0, most: int = _READ) -> str:
    """Read the last `most` bytes of `path`, and nothing before byte `start`. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(start, size - most))
        return file.read().decode("utf-8", errors="replace")

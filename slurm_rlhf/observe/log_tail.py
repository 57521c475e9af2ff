"""The last lines of a log file, for error reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_READ = 1 << 16  # bytes from the end that are looked at

# What torchrun and c10d say when any process ends, whatever the reason: it hides the line that gives the reason.
_NOISE = re.compile(
    r"\*{20,}$"
    r"|Setting OMP_NUM_THREADS environment variable"
    r"|[IWE]\d{4} [\d:.]+ \d+ torch/distributed/elastic/"
    r"|(\[rank\d+\]:)?\[W\d{4,} .*(socket|TCPStore|ProcessGroup\w*|CUDAAllocatorConfig)\.cpp"
    r"|frame #\d+: "
    r"|Exception raised from .* at .*\.[ch]pp:\d+ "
    r"|.*:\d+: (Future|Deprecation|PendingDeprecation)Warning: "
    r"|  (warnings\.)?warn\("
)
_REPORT_BEGINS = re.compile(r"(torch\.distributed\.elastic\S*\.)?ChildFailedError:")
_REPORT_RULE = re.compile(r"={20,}$")
_TRACEBACK = "Traceback (most recent call last):"
_TORCHRUN_FRAME = re.compile(r'  File ".*torch/distributed/(run|launcher/api)\.py"')


def tail(path: Path, lines: int, start: int = 0) -> list[str]:
    """The last `lines` lines of `path` that are not blank; what can be said where there is no such file.

    Reads nothing before byte `start`: what was there before belongs to an earlier start of the run. Leaves out
    deprecations and what torchrun adds when one of its processes ends, unless there is nothing else.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - _READ))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return [f"({path} cannot be read: {error.strerror})"]
    found = [line.rstrip() for line in text.splitlines() if line.strip()]
    telling = list(_telling(found)) or found
    return telling[-lines:] or ["(it is empty)"]


def _telling(lines: list[str]) -> Iterator[str]:
    """Without noise, torchrun's own traceback and its report."""
    traceback: list[str] = []  # of a traceback that may turn out to be torchrun's
    rules_left = 0  # of the report that is being skipped
    for line in lines:
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

"""What this node says of itself and of a process on it: load, memory, states. Linux's /proc, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the kernel, often a file system or a device that does not answer",
    "T": "stopped by a signal; SIGCONT lets it go on",
    "t": "stopped by a debugger",
}
_ENDED = "ZX"


def node_load(proc: Path = Path("/proc")) -> str:
    """Describe how busy this node is, in a line; "?" for what cannot be read."""
    try:
        load = " ".join((proc / "loadavg").read_text(encoding="ascii").split()[:3])
    except OSError:
        load = "?"
    free, total = _memory(proc)
    return f"load {load} on {os.cpu_count()} CPUs, {free} of {total} GiB of memory available"


def _memory(proc: Path) -> tuple[str, str]:
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return "?", "?"
    known = {name: words for name, _, words in (line.partition(":") for line in lines)}

    def gib(name: str) -> str:
        return f"{int(known[name].split()[0]) / 2**20:.1f}" if name in known else "?"

    return gib("MemAvailable"), gib("MemTotal")


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """Describe what a process of this node does: "S (sleeping), in futex_wait_queue"; empty: it has ended."""
    try:
        letter = (proc / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    if letter in _ENDED:
        return ""
    try:
        where = (proc / str(pid) / "wchan").read_text(encoding="ascii").strip()
    except OSError:
        where = ""
    place = f", in {where}" if where not in ("", "0") else ""
    return f"{letter} ({_STATES.get(letter, 'in a state of its own')}){place}"

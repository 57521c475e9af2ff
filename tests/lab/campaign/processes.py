"""Find the processes of a run from outside, by the log that each writes to, and what they hold of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm/"
_MAPPED = re.compile(r"(/dev/shm/\S+)(?: \(deleted\))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """Describe a process; `began`: its start in clock ticks since boot, which tells it from a later one of its pid."""

    pid: int
    parent: int
    began: int
    state: str

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


def look(pid: int) -> Found | None:
    """Describe a process; None where there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Found(pid, int(fields[1]), int(fields[19]), fields[0])


def everyone() -> Iterator[Found]:
    """Yield all processes of this machine."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (found := look(int(entry.name))) is not None:
            yield found


def tree(root: int) -> set[Found]:
    """Return a process and all that it and its children started, as long as their parents live."""
    known = list(everyone())
    children: dict[int, list[Found]] = {}
    for one in known:
        children.setdefault(one.parent, []).append(one)
    found, left = set(), [one for one in known if one.pid == root]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += children.get(one.pid, [])
    return found


def still_there(those: Collection[Found]) -> list[Found]:
    """Return those that live, and are no later processes with the same number."""
    now = [look(one.pid) for one in those]
    return [new for old, new in zip(those, now, strict=True) if new and new.began == old.began and new.alive]


def command_line(pid: int) -> str:
    """Return the command of a process, shortened; empty where it is gone."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:160]


def output_of(pid: int) -> str:
    """Return the file that a process writes its output to; empty where it cannot be seen."""
    try:
        return os.readlink(PROC / str(pid) / "fd" / "1").removesuffix(" (deleted)")
    except OSError:
        return ""


def writers(run_dir: Path) -> dict[str, list[Found]]:
    """List the processes whose output goes to a log of the run, by the log's name: `actor.node.0.log`.

    torchrun and what it has started but is not a rank yet write to `actor.node.torchrun.log`.
    """
    logs = str(run_dir.resolve() / "logs")
    found: dict[str, list[Found]] = {}
    for one in everyone():
        if one.alive and (place := output_of(one.pid)) and os.path.dirname(place) == logs:
            found.setdefault(os.path.basename(place), []).append(one)
    return found


def rank(run_dir: Path, role: str, number: int, node: str = ".*") -> Found | None:
    """Find a rank by its log, on any node or the one given; None: it is not there yet, or not any more."""
    return _first(writers(run_dir), rf"{role}\.{node}\.{number}\.log")


def torchrun(run_dir: Path, role: str) -> Found | None:
    """Find the torchrun of a role."""
    return _first(writers(run_dir), rf"{role}\..*\.torchrun\.log")


def _first(known: dict[str, list[Found]], name: str) -> Found | None:
    """Return the process that started the others with the same log."""
    for log, ones in known.items():
        if re.fullmatch(name, log):
            pids = {one.pid for one in ones}
            return next((one for one in ones if one.parent not in pids), None)
    return None


def shared_memory(those: Collection[Found]) -> set[str]:
    """List the files in /dev/shm that processes have open or mapped."""
    found: set[str] = set()
    for one in those:
        with contextlib.suppress(OSError):
            found.update(_MAPPED.findall((PROC / str(one.pid) / "maps").read_text()))
        with contextlib.suppress(OSError):
            for entry in (PROC / str(one.pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    place = os.readlink(entry)
                    if place.startswith(SHARED_MEMORY):
                        found.add(place.removesuffix(" (deleted)"))
    return found


def held_locks(run_dir: Path) -> list[str]:
    """List the lock files of a run that somebody holds."""
    held = []
    for path in [run_dir / ".control" / "lock", *run_dir.rglob("*.lock")]:
        with contextlib.suppress(FileNotFoundError):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(str(path))
    return held

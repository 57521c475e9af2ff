"""Find the processes of a run from outside, by the log that each writes to, and what they hold of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Collection
from pathlib import Path

import psutil

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm/"
_MAPPED = re.compile(r"(/dev/shm/\S+)(?: \(deleted\))?$", re.MULTILINE)


def tree(root: int) -> set[psutil.Process]:
    """Return a process and all that it and its children started, as long as their parents live; -1 is none."""
    if root < 0:  # a job whose conductor has not begun
        return set()
    try:
        process = psutil.Process(root)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def still_there(those: Collection[psutil.Process]) -> list[psutil.Process]:
    """Return those that live, and are no later processes with the same number."""
    return [one for one in those if _lives(one)]


def _lives(one: psutil.Process) -> bool:
    try:
        return one.is_running() and one.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def command_line(one: psutil.Process) -> str:
    """Return the command of a process, shortened; empty where it is gone."""
    try:
        return " ".join(one.cmdline())[:160]
    except psutil.Error:
        return ""


def output_of(pid: int) -> str:
    """Return the file that a process writes its output to; empty where it cannot be seen."""
    try:
        return os.readlink(PROC / str(pid) / "fd" / "1").removesuffix(" (deleted)")
    except OSError:
        return ""


def writers(run_dir: Path) -> dict[str, list[psutil.Process]]:
    """List the processes whose output goes to a log of the run, by the log's name: `actor.node.0.log`.

    torchrun and what it has started but is not a rank yet write to `actor.node.torchrun.log`.
    """
    logs = str(run_dir.resolve() / "logs")
    found: dict[str, list[psutil.Process]] = {}
    for one in psutil.process_iter():
        if os.path.dirname(place := output_of(one.pid)) == logs:
            found.setdefault(os.path.basename(place), []).append(one)
    return found


def rank(run_dir: Path, role: str, number: int, node: str = ".*") -> psutil.Process | None:
    """Find a rank by its log, on any node or the one given; None: it is not there yet, or not any more."""
    return _first(writers(run_dir), rf"{role}\.{node}\.{number}\.log")


def torchrun(run_dir: Path, role: str) -> psutil.Process | None:
    """Find the torchrun of a role."""
    return _first(writers(run_dir), rf"{role}\..*\.torchrun\.log")


def _first(known: dict[str, list[psutil.Process]], name: str) -> psutil.Process | None:
    """Return the process that started the others with the same log."""
    for log, ones in known.items():
        if re.fullmatch(name, log):
            pids = {one.pid for one in ones}
            return next((one for one in still_there(ones) if one.ppid() not in pids), None)
    return None


def shared_memory(those: Collection[psutil.Process]) -> set[str]:
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

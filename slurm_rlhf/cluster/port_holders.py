"""Find the process that listens on a port of this machine, in the tables of the kernel."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"  # linux/tcp_states.h


def held_by(port: int, proc: Path = _PROC) -> str:
    """Name the process that listens on `port`, as in `python (pid 4021 of alice)`; empty where it is not seen."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(proc / "net" / table, port)}
    if not sockets:
        return ""
    for entry in proc.iterdir():
        if entry.name.isdigit() and _has_one(entry / "fd", sockets):
            return _name(entry)
    return ""


def _listening(table: Path, port: int) -> list[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]


def _has_one(descriptors: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(each) in sockets for each in descriptors.iterdir())
    except OSError:
        return False  # another user's, or it has ended


def _name(process: Path) -> str:
    try:
        name, uid = (process / "comm").read_text().strip(), process.stat().st_uid
    except OSError:
        return f"pid {process.name}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"{name} (pid {process.name} of {user})"

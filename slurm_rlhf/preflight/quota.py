"""What is left of the user's quota on a file system, from the programs that know it: statvfs often does not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.disk import device_of, mount_of

_KIB = 1024
_ASK_S = 5.0
_FIELDS = 8  # used, quota, limit, grace of the blocks, and of the files


@dataclass(frozen=True, slots=True)
class Quota:
    """Hold what this user may still write. None: without a limit."""

    by: str  # the command that says so
    free_bytes: int | None
    free_files: int | None


def quota_on(directory: Path) -> Quota | None:
    """Ask for the quota of this user on the file system of `directory`. Blocks for 5 s at most.

    None where there is no program to ask, no quota, or no answer that can be read. Lustre has `lfs quota`, others (NFS
    with rquotad, XFS, ext4) `quota`.
    """
    point, kind = mount_of(directory)
    if kind == "lustre":
        command, place = ["lfs", "quota", "-q", "-u", str(os.getuid()), str(point)], str(point)
    else:
        # Long lines and no words for the grace time: each line has all of its fields.
        command, place = ["quota", "-w", "-p", "-u"], device_of(point)
    if shutil.which(command[0]) is None:
        return None
    try:
        # Its exit status is that of a quota which is used up, too.
        said = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_quota(said.stdout, place, " ".join(command[:2] if kind == "lustre" else command[:1]))


def read_quota(text: str, place: str, by: str) -> Quota | None:
    """Read what `quota -w -p` or `lfs quota -q` printed of `place`; a long name of it may have a line of its own.

    A star marks what is over its quota, brackets what Lustre could not ask all servers for. The hard limit counts: what
    is over the soft one can be written for a while. Kilobytes are of 1024 bytes; 0 is no limit.
    """
    words = text.split()
    for at, word in enumerate(words):
        fields = [each.strip("*[]") for each in words[at + 1 : at + 1 + _FIELDS]]
        if word == place and len(fields) == _FIELDS:
            free = [_left(fields[:3]), _left(fields[4:7])]
            if free == [None, None]:
                return None
            return Quota(by, None if free[0] is None else _KIB * free[0], free[1])
    return None


def _left(fields: Sequence[str]) -> int | None:
    if not all(field.isdigit() for field in fields):
        return None
    used, soft, hard = map(int, fields)
    most = hard or soft
    return max(most - used, 0) if most else None

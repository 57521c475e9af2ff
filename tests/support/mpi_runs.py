"""`mpirun -np N slurm-rlhf train`, as the tests start it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from training_runs import COMMAND

MPIRUN = str(Path(sys.executable).with_name("mpirun"))


def mpirun(processes: int) -> list[str]:
    """The beginning of a command; more processes than cores are meant."""
    program = MPIRUN if Path(MPIRUN).exists() else shutil.which("mpirun") or "mpirun"
    return [program, "-np", str(processes), "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", *COMMAND]

"""This checkout, and whether its environment was made by sbatch/environment.sh."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAMP = ROOT / ".venv" / "packages.stamp"
MADE_HERE = STAMP.is_file() and STAMP.read_text().rstrip().endswith(f" {ROOT}")


def without_network() -> tuple[str, ...]:
    """A prefix for commands: a network namespace of their own where this user may have one."""
    prefix = ("unshare", "--map-root-user", "--net")
    allowed = shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if allowed and allowed.returncode == 0 else ()

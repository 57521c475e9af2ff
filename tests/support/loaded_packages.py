"""Which packages a command loads: what its start costs, measured without a clock."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

LIBRARIES = {"torch", "numpy", "transformers", "deepspeed", "vllm", "zmq", "pandas", "mpi4py", "submitit"}
"""Packages that take long to load or do so for nothing, where a command only looks at files."""


def packages_loaded(command: Sequence[str]) -> set[str]:
    """Names of the packages outside Python's own that the interpreter of `command` imports."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    said = subprocess.run(command, **quiet, text=True, check=False, env=environment).stderr
    names = set(re.findall(r"^import time: .*\| +(\w+)", said, re.MULTILINE))
    assert "slurm_rlhf" in names, said
    return names

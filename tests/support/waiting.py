"""How long tests wait. A bound on a wait ends a test that hangs: it is wide, stands here, and measures nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_QUICK_S = 2.0
"""Seconds from the start of a process until it has imported torch, on an idle core of a quick machine."""
_VARIABLE = "SLURM_RLHF_TEST_SLOWNESS"
"""Environment variable by which a run of the tests passes on what its first process measured."""


def _measured() -> float:
    took = []
    for _ in range(2):  # the first start also reads the files from the disk
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], stdin=subprocess.DEVNULL, check=True)
        took.append(time.monotonic() - began)
    return max(1.0, min(took) / _QUICK_S) * max(1.0, 2 / len(os.sched_getaffinity(0)))


SLOWNESS: Final = float(os.environ.setdefault(_VARIABLE, "") or _measured())
"""How many times slower this machine is than two idle cores of a quick one, at least 1: measured once per run."""
os.environ[_VARIABLE] = f"{SLOWNESS:.3f}"

HANG_S: Final = 300.0 * SLOWNESS
"""Seconds after which a wait counts as a hang; several times what the slowest wait of the tests takes."""


def scaled(seconds: float) -> float:
    """A time-out of the product, in seconds, that a test shortens without testing it, as this machine needs it."""
    return seconds * SLOWNESS


def until(ready: Callable[[], Any], what: str = "what the test waits for", pause_s: float = 0.01) -> Any:
    """Wait until `ready` gives something true, and return that; AssertionError after HANG_S."""
    end = time.monotonic() + HANG_S
    while not (found := ready()):
        assert time.monotonic() < end, f"{what} did not come within {HANG_S:.0f} s"
        time.sleep(pause_s)
    return found

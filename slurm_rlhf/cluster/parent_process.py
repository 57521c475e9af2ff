"""Tie a process of a run to the process that started it: variables that it inherits, and its end."""

from __future__ import annotations

import ctypes
import os
import signal

STORE_FD = "SLURM_RLHF_STORE_FD"
"""Variable with the number of the socket on which the first rank of a role opens the store of the role."""

KEYS = "SLURM_RLHF_RUN_KEYS"
"""Variable with the keys of the run, where they are not read from the run directory."""


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process signal `number` when the thread that started it ends.

    If the parent has ended already, this process exits at once. `parent` is the process id of the parent at the time
    when this process was started. The setting survives exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)

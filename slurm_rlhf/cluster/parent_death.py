"""Tying a process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process signal `number` when the thread that started it ends.

    If that has happened already, it leaves at once. `parent` is the process id of the parent as it was when this
    process was started. The setting survives exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)

"""`python -m slurm_rlhf.launch.exec_shim PARENT_PID SIGNAL COMMAND...`: become COMMAND, but never outlive the parent.

A launcher that is killed outright thereby leaves no torchrun behind, and no worker either: those do the same.
"""

from __future__ import annotations

import os
import signal
import sys

from slurm_rlhf.cluster.child_process import die_with_parent


def shimmed(command: list[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """`command` as a child of this process that gets signal `number` when this process ends."""
    return [sys.executable, "-m", "slurm_rlhf.launch.exec_shim", str(os.getpid()), str(int(number)), *command]


def main() -> None:
    die_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()

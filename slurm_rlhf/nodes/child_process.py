"""Start child processes that never outlive this one.

`python -m slurm_rlhf.nodes.child_process PARENT_PID SIGNAL COMMAND...` becomes COMMAND, which gets SIGNAL when the
parent ends. So a launcher that is killed leaves no torchrun behind, and no worker either: workers do the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slurm_rlhf.cluster.processes import die_with_parent


def bound_to_parent(command: list[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return `command` as a child of this process that gets signal `number` when this process ends."""
    return [sys.executable, "-m", "slurm_rlhf.nodes.child_process", str(os.getpid()), str(int(number)), *command]


def start_child(
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    number: signal.Signals = signal.SIGKILL,
    pass_fds: tuple[int, ...] = (),
    new_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Start `command` with its output appended to `log`; it gets signal `number` when the calling thread ends."""
    with open(log, "ab") as out:
        return subprocess.Popen(
            bound_to_parent(command, number),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=new_session,
        )


def main() -> None:
    die_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()

"""Know the processes of a run: the conductor that works on a run directory, and what ties a process to its parent."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.run_directory import write_atomically

SESSION_FILE = "session.json"
"""Name of the file in the run directory."""


@dataclass(frozen=True, slots=True)
class Session:
    """Describe the conductor that works, or worked last, on a run. Outside Slurm the fields of the job are empty."""

    host: str
    pid: int
    began: float  # seconds since the epoch
    job_id: str = ""  # SLURM_JOB_ID
    task: str = ""  # 12_3, for a task of an array
    first_node: str = ""

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Session:
        """Describe this process, in the Slurm job of `environ`."""
        host, slurm = socket.gethostname(), read_slurm(environ)
        if slurm is None:
            return cls(host, os.getpid(), time.time())
        array = slurm.array_job_id
        task = f"{array}_{slurm.array_task_id}" if array is not None else ""
        return cls(host, os.getpid(), time.time(), str(slurm.job_id), task, slurm.job_nodes[0])

    def write(self, run_dir: Path) -> None:
        """Write the file to `run_dir`."""
        write_atomically(run_dir / SESSION_FILE, json.dumps(asdict(self)) + "\n")


def read_session(run_dir: Path) -> Session | None:
    """Read the file in `run_dir`; None where no run was started yet."""
    try:
        return Session(**json.loads((run_dir / SESSION_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def running(pid: int) -> bool:
    """Tell whether a process of this machine runs; one that has ended and that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def attach_line(job_id: str, node: str) -> str:
    """Return the command that opens a shell on `node`, beside the steps of the job."""
    return f"srun --jobid={job_id} --overlap --pty --nodes=1 --nodelist={node} bash"


STORE_FD = "SLURM_RLHF_STORE_FD"
"""Variable with the number of the socket on which the first rank of a role opens the store of the role."""

STORE_RANKS = "SLURM_RLHF_STORE_RANKS"
"""Variable with the number of ranks that meet at that store: it listens until all have come."""

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

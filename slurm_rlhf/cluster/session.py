"""Record which process works on a run directory: a small file for commands that look for its job."""

from __future__ import annotations

import json
import os
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


def attach_line(job_id: str, node: str) -> str:
    """Return the command that opens a shell on `node`, beside the steps of the job."""
    return f"srun --jobid={job_id} --overlap --pty --nodes=1 --nodelist={node} bash"

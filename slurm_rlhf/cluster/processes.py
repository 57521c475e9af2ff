"""Describe processes of a run: its session, how a process ends with its parent, what it does, how it ended."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.run_directory import files_exhausted, most_files, write_atomically

SESSION_FILE = "session.json"
"""Name of the file in the run directory."""


@dataclass(frozen=True, slots=True)
class Session:
    """Identify the newest conductor of a run. Outside Slurm the fields of the job are empty."""

    host: str
    pid: int
    began: float  # seconds since the epoch
    job_id: str = ""  # SLURM_JOB_ID
    task: str = ""  # 12_3, for a task of an array
    first_node: str = ""

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Session:
        """Describe this process, in the Slurm job of `environ`."""
        from slurm_rlhf.cluster.slurm_environment import read_slurm  # loads the schema, which a worker does without

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
    """Read the file in `run_dir`; None if no run was started there yet."""
    try:
        return Session(**json.loads((run_dir / SESSION_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def running(pid: int) -> bool:
    """Tell whether a process of this machine runs; a zombie does not."""
    return _letter(pid) not in _ENDED


_PROC = Path("/proc")
_ENDED = ("", "Z", "X")


def _letter(pid: int) -> str:
    """Return the letter of a process's state; empty if there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


_OFTEN = {
    -signal.SIGKILL: " (often: the memory of the node or the job was full; lower vllm.cpu_kvcache_gib, use fewer ranks "
    "on a node, or ask for --mem=0)",
    -signal.SIGBUS: " (often: /dev/shm was full)",
}


KILLED = "was killed by "


def exit_text(code: int) -> str:
    """Describe how a process with the exit status `code` ended; it is negative for a signal."""
    number = -code if code < 0 else code - 128  # shells and the conductor report signals as 128 + number
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}" if code < 0 else ""
    if code < 0:
        return f"{KILLED}{name}"
    return f"ended with status {code}" + (f" (128 + {name})" if name else "")


def usual_cause(code: int) -> str:
    """Return in brackets the usual cause of an exit status; empty if there is none."""
    return _OFTEN.get(code, "")


def attach_line(job_id: str, node: str) -> str:
    """Return the command that opens a shell on `node` in the job."""
    return f"srun --jobid={job_id} --overlap --pty --nodes=1 --nodelist={node} bash"


STORE_FD = "SLURM_RLHF_STORE_FD"
"""Variable with the descriptor of the socket at which the first rank of a role opens the role's store."""

CONDUCTOR_GONE = "the conductor is gone"
"""Last line in the log of a rank that ends itself because it has lost the conductor."""

CONDUCTOR_GONE_STATUS = 75
"""Exit status of a rank that ends itself because it has lost the conductor."""

KEYS = "SLURM_RLHF_RUN_KEYS"
"""Variable with the keys of the run, if they are not read from the run directory."""

PARENT = "SLURM_RLHF_PARENT"
"""Variable with the process id of the torchrun that starts a rank: if it ends early, the rank's getppid is another."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


_DESCRIPTORS = 65536  # highest soft limit that is set: some programs close all possible descriptors, one by one
_OF_A_RANK = 2  # connections of a rank to the conductor
_OTHERS = 128


def raise_descriptors(ranks: int = 0) -> None:
    """Raise the soft limit of open files for this process, the first of the run on its node, and all that it starts.

    `ranks`: the number of ranks that will connect to it. Raises ConfigError if the limit is too low for them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if ranks and (needed := _OF_A_RANK * ranks + _OTHERS) > most_files():
        raise ConfigError(
            f"{ranks} ranks take {needed} files and connections of the process that leads them. {files_exhausted()}, "
            "or use fewer ranks"
        )


def keep_others_out() -> None:
    """If the umask lets other users write files of this process and its children, deny them all access."""
    umask = os.umask(0o077)
    os.umask(umask if umask & 0o002 else umask | 0o007)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process signal `number` when the thread that started it ends, also after exec.

    `parent` is the process id of the process that started this one. If it has ended already, this process exits.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the kernel, often a file system or a device that does not answer",
    "T": "stopped by a signal; SIGCONT resumes it",
    "t": "stopped by a debugger",
}


def node_load() -> str:
    """Describe the load and the free memory of this node in a line."""
    import psutil  # a light install, which serves environments, does without it

    load, memory = " ".join(f"{each:.2f}" for each in psutil.getloadavg()), psutil.virtual_memory()
    free, total = memory.available / 2**30, memory.total / 2**30
    return f"load {load} on {os.cpu_count()} CPUs, {free:.1f} of {total:.1f} GiB of memory available"


def process_state(pid: int) -> str:
    """Describe what a process of this node does: "S (sleeping), in futex_wait_queue"; empty if it has ended."""
    letter = _letter(pid)
    if letter in _ENDED:
        return ""
    try:
        where = (_PROC / str(pid) / "wchan").read_text(encoding="ascii").strip()
    except OSError:
        where = ""
    place = f", in {where}" if where not in ("", "0") else ""
    return f"{letter} ({_STATES.get(letter, 'unknown')}){place}"


def print_to(path: Path) -> None:
    """Append all that this process prints from now on to a file, also from libraries written in C."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)

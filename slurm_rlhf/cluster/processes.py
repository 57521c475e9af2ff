"""Know the processes of a run: who works on a run directory, what ties one to its parent, what it does, how it ends."""

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

from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.disk import files_exhausted, most_files
from slurm_rlhf.errors import ConfigError
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


_OFTEN = {
    -signal.SIGKILL: " (often: the node's or the job's memory was full; lower vllm.cpu_kvcache_gib or the ranks on a "
    "node, or ask for --mem=0)",
    -signal.SIGBUS: " (often: /dev/shm was full)",
}


KILLED = "was killed by "


def exit_text(code: int) -> str:
    """Describe how a process ended whose exit status is `code`, negative for a signal."""
    number = -code if code < 0 else code - 128  # as shells and the conductor itself tell of a signal
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}" if code < 0 else ""
    if code < 0:
        return f"{KILLED}{name}"
    return f"ended with status {code}" + (f" (128 + {name})" if name else "")


def usual_cause(code: int) -> str:
    """Return in brackets what often ends a process so, if nobody ended it on purpose; empty: nothing in particular."""
    return _OFTEN.get(code, "")


def attach_line(job_id: str, node: str) -> str:
    """Return the command that opens a shell on `node`, beside the steps of the job."""
    return f"srun --jobid={job_id} --overlap --pty --nodes=1 --nodelist={node} bash"


STORE_FD = "SLURM_RLHF_STORE_FD"
"""Variable with the number of the socket on which the first rank of a role opens the store of the role."""

STORE_RANKS = "SLURM_RLHF_STORE_RANKS"
"""Variable with the number of ranks that meet at that store: it listens until all have come."""

CONDUCTOR_GONE = "the conductor is gone"
"""The last words of a rank that leaves by itself, in its log."""

CONDUCTOR_GONE_STATUS = 75
"""Exit status of such a rank."""

KEYS = "SLURM_RLHF_RUN_KEYS"
"""Variable with the keys of the run, where they are not read from the run directory."""

PARENT = "SLURM_RLHF_PARENT"
"""Variable with the process id of the torchrun that starts a rank: it may end before the rank can ask for it."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


_DESCRIPTORS = 65536  # limit of a process; some programs close all possible ones, one by one
_OF_A_RANK = 2  # connections to the conductor
_BESIDE = 128


def raise_descriptors(ranks: int = 0) -> None:
    """Let this process, and those that it starts, open as many files as they may: the first on each node calls it.

    `ranks`: those that will connect to this process. Raises ConfigError where that many cannot.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if ranks and (needed := _OF_A_RANK * ranks + _BESIDE) > most_files():
        raise ConfigError(
            f"{ranks} ranks take {needed} files and connections of the process that leads them. {files_exhausted()}, "
            "or let the run have fewer ranks"
        )


def keep_others_out() -> None:
    """Give others no right to what this process and those that it starts write, where its umask lets them change it."""
    umask = os.umask(0o077)
    os.umask(umask if umask & 0o002 else umask | 0o007)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process signal `number` when the thread that started it ends.

    If the parent has ended already, this process exits at once. `parent` is the process id of the parent at the time
    when this process was started. The setting survives exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the kernel, often a file system or a device that does not answer",
    "T": "stopped by a signal; SIGCONT lets it go on",
    "t": "stopped by a debugger",
}
_ENDED = "ZX"


def node_load(proc: Path = Path("/proc")) -> str:
    """Describe how busy this node is, in a line; "?" for what cannot be read."""
    try:
        load = " ".join((proc / "loadavg").read_text(encoding="ascii").split()[:3])
    except OSError:
        load = "?"
    free, total = _memory(proc)
    return f"load {load} on {os.cpu_count()} CPUs, {free} of {total} GiB of memory available"


def _memory(proc: Path) -> tuple[str, str]:
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return "?", "?"
    known = {name: words for name, _, words in (line.partition(":") for line in lines)}

    def gib(name: str) -> str:
        return f"{int(known[name].split()[0]) / 2**20:.1f}" if name in known else "?"

    return gib("MemAvailable"), gib("MemTotal")


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """Describe what a process of this node does: "S (sleeping), in futex_wait_queue"; empty: it has ended."""
    try:
        letter = (proc / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    if letter in _ENDED:
        return ""
    try:
        where = (proc / str(pid) / "wchan").read_text(encoding="ascii").strip()
    except OSError:
        where = ""
    place = f", in {where}" if where not in ("", "0") else ""
    return f"{letter} ({_STATES.get(letter, 'in a state of its own')}){place}"


def print_to(path: Path) -> None:
    """Append all that this process prints from now on to a file, libraries written in C included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)

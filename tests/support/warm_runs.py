"""Whole runs, and torchruns of a test's own ranks, forked from a process that has imported their libraries.

Most of a start is the imports of torch, transformers, DeepSpeed and vLLM, once for each rank and each torchrun. All
else is as a user starts it: conductor, torchruns and ranks are processes with sessions, signals, environments and
output of their own, and die with their parents. Run as a program, this file is the process that they are forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from slurm_rlhf.cluster.processes import PARENT

ROOT = Path(__file__).parents[2]
REGISTRY = "SLURM_RLHF_TEST_COMMANDS"
"""A variable of forked processes: a directory with a file for each, named by process id, with its command."""
TORCHRUN = "torch.distributed.run"
RANK = "slurm_rlhf.ranks.rank_process"
MODULES = ("slurm_rlhf.cli", "slurm_rlhf.nodes.agent", "slurm_rlhf.ranks.torchrun", RANK, TORCHRUN)
"""Modules that are forked in place of a new Python: a stage of a pipeline, a node's agent, its children, and theirs."""
WRAPPER = "slurm_rlhf.nodes.child_process"
_ABOVE = 900  # numbers of files that nobody uses


class Forker:
    """The handle of a process without threads that forks on demand, over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._connection, [data], files)
            self._connection.sendall(data[sent:])
            answer, _ = _line(self._connection)
            if not answer:
                raise ConnectionError("the process that forks is gone")
            return json.loads(answer)


class Forked:
    """A forked process, as `subprocess.Popen`."""

    stdin: TextIO | None = None
    stdout: TextIO | None = None

    def __init__(
        self,
        forker: Forker,
        command: Sequence[str],
        environment: dict[str, str],
        files: Sequence[int],
        bound: int,
        kept: Sequence[int] = (),
    ) -> None:
        """`bound`: the signal that it gets when the process that forks it ends, or 0; `kept`: stays open as it is."""
        self.args = list(command)
        self.returncode: int | None = None
        self._forker = forker
        self._polling = threading.Lock()  # its end is reported once, to whoever asks first
        request = {"command": self.args, "environment": environment, "directory": os.getcwd(), "bound": bound}
        self.pid: int = forker.ask({**request, "kept": list(kept)}, [*files, *kept])

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                try:
                    self.returncode = self._forker.ask({"poll": self.pid})
                except OSError:  # its forker was killed, and it is bound to end with it
                    self.returncode = -signal.SIGKILL
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmRun(Forked):
    """The conductor of a run, or a torchrun: a forked process whose output can be read."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with open(os.devnull) as nothing:
            files = (nothing.fileno(), self._output.fileno(), self._output.fileno())
            super().__init__(_zygote().forker, command, {**environment, REGISTRY: _zygote().registry}, files, 0)

    def printed(self) -> str:
        """Return what the process printed so far."""
        # The reader has a place of its own: the run shares the file's.
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.printed(), None


class WarmRank(Forked):
    """A rank of a run, started as torchrun would; what it prints is the test's."""

    def __init__(self, arguments: Sequence[str], torchrun: dict[str, str], script: str = "") -> None:
        """`script`: what it runs in place of the ranks' module."""
        program = ["-u", script] if script else ["-m", RANK]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"VLLM_HOST_IP": "127.0.0.1", REGISTRY: _zygote().registry, **torchrun}
        with open(os.devnull) as nothing:
            files = (nothing.fileno(), 2, 2)
            command = [sys.executable, *program, *arguments]
            super().__init__(_zygote().forker, command, environment, files, signal.SIGKILL)


class WarmProgram(Forked):
    """A file of the tests, run as a program that reads lines and answers them; what it says else is dropped."""

    stdin: TextIO
    stdout: TextIO

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """`command`: Python, -u, the file and its arguments."""
        asked, ask = os.pipe()
        answer, answers = os.pipe()
        with open(os.devnull, "w") as nothing:
            files = (asked, answers, nothing.fileno())
            super().__init__(
                _zygote().forker, command, {**environment, REGISTRY: _zygote().registry}, files, signal.SIGKILL
            )
        os.close(asked)
        os.close(answers)
        self.stdin, self.stdout = open(ask, "w"), open(answer)  # noqa: SIM115


class _Zygote:
    """The program below, with everything imported."""

    def __init__(self) -> None:
        self.registry = tempfile.mkdtemp(prefix="warm-runs-")
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.forker = Forker(ours)


_running: list[_Zygote] = []


def _zygote() -> _Zygote:
    if not _running:
        _running.append(_Zygote())
    return _running[0]


def end() -> None:
    """End the process that forks, if there is one; the session does it (conftest.py)."""
    while _running:
        zygote = _running.pop()
        zygote.process.kill()
        zygote.process.wait()


def commands() -> dict[int, str]:
    """Command lines of forked processes by process id, also of those that have ended."""
    found = {}
    for path in Path(_running[0].registry).iterdir() if _running else ():
        found[int(path.name)] = path.read_text()
    return found


# --- in the processes that are forked, and in those that fork them ---------------------------------------------------


def _line(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A line, and the files that came with it; nothing where the other end is gone. No more follows unanswered."""
    data = b""
    files: list[int] = []
    while not data.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(connection, 1 << 16, 5)
        if not part:
            return b"", files
        data += part
        files += more
    return data, files


def _serve(connection: socket.socket) -> None:
    """Fork, and wait for what was forked, as the owner asks."""
    while True:
        data, files = _line(connection)
        if not data:
            os._exit(0)  # the owner is gone
        request = json.loads(data)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            parent = os.getpid()
            answer = os.fork()
            if answer == 0:
                connection.close()
                _live(request, files, parent)
            for file in files:
                os.close(file)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _live(request: dict[str, Any], files: list[int], parent: int) -> None:
    """Be the process that the command would start; does not return."""
    code = 1
    try:
        _prepare(request, files, parent)
        _run(request["command"])
        code = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prepare(request: dict[str, Any], files: list[int], parent: int) -> None:
    os.setsid()
    if request["bound"]:
        _die_with(parent, request["bound"])
    targets = [0, 1, 2, *request["kept"]]
    # First away from the numbers that they are to have.
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, target in zip(moved, targets, strict=False):
        os.dup2(file, target)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    atexit._clear()
    os.environ.clear()
    os.environ.update(request["environment"])
    if PARENT in os.environ:
        os.environ[PARENT] = str(parent)
    os.chdir(request["directory"])
    Path(os.environ[REGISTRY], str(os.getpid())).write_text(" ".join(request["command"]))
    _take_popen(_forker())


def _die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent ends, as a launcher's children do."""
    ctypes.CDLL(None, use_errno=True).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _forker() -> Forker:
    """A process that forks for this one from here, where it has no threads yet."""
    ours, theirs = socket.socketpair()
    owner = os.getpid()
    if os.fork() == 0:
        ours.close()
        _die_with(owner)
        _serve(theirs)
    theirs.close()
    return Forker(ours)


def _take_popen(forker: Forker) -> None:
    """Fork where a new Python would run one of `MODULES`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    usual = subprocess.Popen

    def popen(args: Any, **options: Any) -> Any:
        command = list(args) if isinstance(args, (list, tuple)) else []
        module = next((word for word in command if word in MODULES), None)
        if not (module or _is_ranks_program(command)):
            return usual(args, **options)
        wrapped = WRAPPER in command
        bound = int(signal.SIGKILL) if module != RANK else 0
        if wrapped:
            bound = int(command[command.index(WRAPPER) + 2])
        if wrapped or module not in (None, RANK):
            command = [sys.executable, "-m", *command[command.index(str(module)) :]]
        out = _number(options.get("stdout"), 1)
        err = out if options.get("stderr") == subprocess.STDOUT else _number(options.get("stderr"), 2)
        with open(os.devnull) as nothing:
            environment = dict(options.get("env") or os.environ)
            return Forked(
                forker, command, environment, (nothing.fileno(), out, err), bound, options.get("pass_fds", ())
            )

    subprocess.Popen = popen  # type: ignore[assignment,misc]
    subprocess_handler.Popen = popen


def _is_ranks_program(command: list[str]) -> bool:
    """Whether torchrun starts a rank by it, from a file of the tests."""
    return command[:2] == [sys.executable, "-u"] and Path(command[2]).is_relative_to(ROOT / "tests")


def _number(file: Any, otherwise: int) -> int:
    return otherwise if file is None else int(file.fileno())


def _run(command: list[str]) -> None:
    """Run a command as Python would: `-c` is the command line `slurm-rlhf`, `-m` a module, `-u` a file."""
    sys.orig_argv[:] = command
    for directory in reversed(os.environ.get("PYTHONPATH", "").split(":")):
        if directory and directory not in sys.path:
            sys.path.insert(0, directory)
            if (Path(directory) / "sitecustomize.py").exists():
                runpy.run_path(str(Path(directory) / "sitecustomize.py"), run_name="sitecustomize")
    if command[1] == "-c":
        from slurm_rlhf.cli.main import main

        sys.argv = ["slurm-rlhf", *command[3:]]
        sys.exit(main())
    from slurm_rlhf.engine import vllm as backend

    # vLLM is imported already, with these variables.
    backend.prepare_environment = lambda: os.environ.update(backend.vllm_environment(False))
    if "-m" not in command[:3]:
        sys.argv = command[2:]
        runpy.run_path(command[2], run_name="__main__")
        return
    at = command.index("-m")
    sys.argv = [command[at + 1], *command[at + 2 :]]
    runpy.run_module(command[at + 1], run_name="__main__")


def _import_libraries() -> None:
    import torch

    from slurm_rlhf.engine._vllm import import_vllm
    from slurm_rlhf.engine.vllm import prepare_environment
    from slurm_rlhf.trainer._deepspeed import import_deepspeed

    prepare_environment()
    import torch.distributed.run
    import transformers.modeling_utils  # noqa: F401

    import_deepspeed(torch.device("cpu"))
    import_vllm()
    import vllm.entrypoints.llm  # noqa: F401


if __name__ == "__main__":
    _import_libraries()
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))

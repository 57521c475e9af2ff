"""A rank's process: how torchrun starts it, how it answers calls, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import completed
from waiting import HANG_S, until

from slurm_rlhf.cluster.processes import PARENT, running
from slurm_rlhf.observe.log_tail import first_failure
from slurm_rlhf.ranks import worker
from slurm_rlhf.ranks.rank_process import serve

CRASH = """
import os, signal
import xgrammar
from slurm_rlhf.ranks.rank_process import crash_at_once

def caught():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) & 1 << signal.SIGSEGV - 1)

before = caught()
crash_at_once()
print(before, caught(), flush=True)
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
def test_a_crash_ends_the_process_without_stacks_of_a_library() -> None:
    """xgrammar, which vLLM imports for an engine, brings a handler that writes C stacks, for seconds."""
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout.split() == ["True", "False"]
    assert "Segfault" not in done.stderr + done.stdout


def test_a_rank_whose_torchrun_ended_before_it_could_ask_for_it_ends_at_once(tmp_path: Path) -> None:
    """Its parent is process 1 by then, which never ends: the torchrun itself says who it was."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    options = ["--role=critic", f"--run_dir={tmp_path}", "--endpoint=tcp://127.0.0.1:9", "--first_rank=0", "--world=1"]
    command = [sys.executable, "-m", "slurm_rlhf.ranks.rank_process", *options]
    done = completed(command, env=os.environ | {PARENT: str(gone.pid)})
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


FULL = """
import resource, sys
from slurm_rlhf.ranks import rank_process

limit = rank_process._address_space() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
rank_process.beat(60.0)
print("goes on", flush=True)
"""


@pytest.mark.parametrize("left", [0, 64 << 20])
def test_a_rank_without_address_space_ends_and_says_so(left: int) -> None:
    """`Thread.start` waits for ever for a thread that gets none to begin with: the rank passed for one in a C call."""
    words = [sys.executable, "-c", FULL, str(left)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == ((0, "goes on\n") if left else (1, ""))
    assert bool(done.stderr) == (not left)
    assert left or "GiB of address space here (`ulimit -v`, RLIMIT_AS), and that is used up: start with" in done.stderr


@dataclass
class Calls:
    """A client and a worker in one: what is called, and what is done of it."""

    waiting: list[str]
    phase: str = "start"
    done: list[str] = field(default_factory=list)

    def receive(self, timeout_s: float | None) -> Any:
        method = self.waiting.pop(0)
        return SimpleNamespace(method=method, failed=False, reply=self.done.append)

    def busy(self) -> bool:
        return False

    def handle(self, request: Any) -> None:
        self.done.append(f"{request.method} in {self.phase}")

    def shutdown(self) -> str:
        return "left"


def test_a_rank_answers_calls_until_it_is_asked_to_leave() -> None:
    calls, loaded = Calls(["start", "train_step", "shutdown", "more"]), list[bool]()
    serve(calls, calls, loaded.append)  # type: ignore[arg-type]
    assert calls.done == ["start in start", "train_step in train_step", "left"]
    assert (calls.phase, calls.waiting, loaded) == ("shutdown", ["more"], [False])


def test_the_flight_recorder_is_switched_on_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine is a process group of its own, in which torch counts from 0: names have the rank of the role."""
    (tmp_path / "device").touch()
    monkeypatch.setenv(worker.PIPE, "kept")
    monkeypatch.setattr(worker, "_DEVICES", (str(tmp_path / "device"),))
    info = worker.RankInfo("rollout", 5, 8, 1, "gpu002")
    worker.record_flights(tmp_path, info)
    assert os.environ[worker.PIPE] == "kept"
    monkeypatch.delenv(worker.PIPE)
    worker.record_flights(tmp_path / "nowhere", info)
    assert worker.PIPE not in os.environ
    monkeypatch.setenv(worker.TRACE, "nccl_trace.rollout.")
    worker.record_flights(tmp_path, info)
    assert os.environ[worker.PIPE] == f"{tmp_path}/flights.rollout.5."
    assert os.environ[worker.TRACE] == "nccl_trace.rollout.5."
    assert [path.name for path in tmp_path.iterdir()] == ["device"]
    os.mkfifo(pipe := tmp_path / "flights.rollout.5.0.pipe")  # as torch does in the first rank of an engine
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    worker.take_stacks()  # without a reader nobody waits
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader:
        worker.take_stacks()
        assert reader.read(9) == b"1"


# --- torchrun ---------------------------------------------------------------------------------------------------------


RANKS = """
import os, signal, sys, time
from pathlib import Path

place = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if os.environ["LOCAL_RANK"] == "1":
    while not (place / "ready").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
(place / "ready").write_text(str(os.getpid()))
signal.sigwait({signal.SIGTERM})
(place / "terminated").touch()
time.sleep(600)
"""
"""Rank 0 takes SIGTERM for a preemption, as inside a Slurm step, and goes on; rank 1 is killed."""


@pytest.mark.slow
def test_the_others_are_killed_when_a_rank_was(tmp_path: Path) -> None:
    """By SIGTERM they would tell of a preemption, and this torchrun would wait for them for half a minute."""
    script, log = tmp_path / "ranks.py", tmp_path / "log"
    script.write_text(RANKS)
    options = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=bound", "--rdzv-endpoint=127.0.0.1:0"]
    options += ["--rdzv-conf=rank=0,ranks=0", "--max-restarts=0", "--monitor-interval=0.2"]
    with log.open("w") as out:
        words = [sys.executable, "-m", "slurm_rlhf.ranks.torchrun", *options, str(script), str(tmp_path)]
        code = subprocess.call(words, stdout=out, stderr=subprocess.STDOUT, timeout=HANG_S)
    assert code == 1, log.read_text()
    failed = first_failure(log)
    assert (failed.rank, failed.exitcode) == (1, -9)
    until(lambda: not running(int((tmp_path / "ready").read_text())), "end of rank 0")
    assert not (tmp_path / "terminated").exists()

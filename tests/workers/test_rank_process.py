"""What a rank does with its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

from slurm_rlhf.cluster.processes import PARENT
from slurm_rlhf.workers import own_stacks

CRASH = """
import os, signal
import xgrammar
from slurm_rlhf.workers.rank_process import crash_at_once

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


@pytest.mark.slow
def test_a_rank_whose_torchrun_ended_before_it_could_ask_for_it_ends_at_once(tmp_path: Path) -> None:
    """Its parent is process 1 by then, which never ends: the torchrun itself says who it was."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    options = ["--role=critic", f"--run_dir={tmp_path}", "--endpoint=tcp://127.0.0.1:9", "--first_rank=0", "--world=1"]
    done = subprocess.run(
        [sys.executable, "-m", "slurm_rlhf.workers.rank_process", *options],
        env=os.environ | {PARENT: str(gone.pid)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_the_flight_recorder_is_switched_on_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").touch()
    monkeypatch.setenv(own_stacks.PIPE, "kept")
    monkeypatch.setattr(own_stacks, "_DEVICES", (str(tmp_path / "device"),))
    own_stacks.record_flights(tmp_path, "actor")
    assert os.environ[own_stacks.PIPE] == "kept"
    monkeypatch.delenv(own_stacks.PIPE)
    own_stacks.record_flights(tmp_path / "nowhere", "actor")
    assert own_stacks.PIPE not in os.environ
    own_stacks.record_flights(tmp_path, "actor")
    assert os.environ[own_stacks.PIPE] == f"{tmp_path}/flights.actor."
    assert [path.name for path in tmp_path.iterdir()] == ["device"]

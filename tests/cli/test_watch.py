"""`slurm-rlhf status RUN --watch`: curves beside the status, to the end of the run, on a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, until

from slurm_rlhf.cli import main as cli
from slurm_rlhf.cli.status import bar, sparkline, status_of
from slurm_rlhf.cluster.processes import Session
from slurm_rlhf.observe.run_status import Summary

SUMMARY = Summary("running", 0, 4, None, None, None, None, 1.0, 2.0, 0, {"actor": 1}, 1)


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "reward": step / 4,
        "time/step": 2.0,
        "time/rollout": 1.0,
        "time/update": 0.5,
        "time/sync": 0.5,
        "perf/engine/0/tokens_per_s": 900.0,
        "perf/engine/1/tokens_per_s": 300.0,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    SUMMARY.write(tmp_path / "summary.json")
    Session.here({}).write(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in (1, 2))
    return tmp_path


@contextmanager
def held(run: Path) -> Iterator[None]:
    """The run's lock is held, as by its conductor."""
    (run / ".control").mkdir()
    with (run / ".control" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def finish(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in (3, 4))
    Summary("finished", 4, 4, None, None, 0.25, 1.0, 8.0, 2.0, 4, {"actor": 1}, 1).write(run / "summary.json")


@pytest.mark.slow
def test_a_frame_has_status_curve_phases_and_engines(run: Path) -> None:
    finish(run)
    lines, over = status_of(str(run), curves=True)
    assert over
    text = "\n".join(lines)
    assert f"{run}: finished" in text
    assert "step        4/4, reward 1" in text
    assert "reward      ▁▃▆█  0.25 to 1 in 4 steps" in text
    assert f"last step   {'r' * 30}{'u' * 15}{'s' * 15}" in text
    assert "rollout 1 s, update 0.5 s, sync 0.5 s" in text
    assert "1200 tokens/s, the slowest is engine 1 with 300" in text


@pytest.mark.slow
def test_into_a_pipe_each_frame_follows_the_last_until_the_run_is_over(run: Path) -> None:
    with held(run):
        command = [sys.executable, "-m", "slurm_rlhf.cli", "status", str(run), "--watch"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        first = process.stdout.readline()
        finish(run)
        rest, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert "started without Slurm" in first
    assert rest.count(": finished") == 1
    assert "step        4/4" in rest


@pytest.mark.slow
def test_on_a_terminal_it_stays_in_place(run: Path) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "LINES": "40", "TERM": "xterm"}
    with held(run):
        command = [sys.executable, "-m", "slurm_rlhf.cli", "status", str(run), "--watch"]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=env)
        os.close(theirs)
        shown = bytearray()

        def read() -> None:
            try:
                while part := os.read(ours, 65536):
                    shown.extend(part)
            except OSError:  # the other end is closed
                pass

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        until(lambda: b"2/4" in shown, "step 2")
        finish(run)
        assert process.wait(timeout=HANG_S) == 0
        reader.join(HANG_S)
    assert b"\x1b[1A" in shown  # up, over the frame before
    assert b"4/4" in shown


@pytest.mark.slow
def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--watch"]) == 2
    assert "usage: slurm-rlhf status RUN [--watch]" in capsys.readouterr().err


def test_curves_and_bars_of_characters() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([3, 3, 3], 10) == "▅▅▅"
    assert sparkline([1, None, math.nan, 2], 9) == "▁  █"
    assert sparkline([], 5) == sparkline([None, math.inf], 5) == ""
    assert bar({"rollout": 2.0, "update": 1.0, "sync": 1.0}, 8) == "rrrruuss"
    assert bar({"rollout": 0.0}, 8) == bar({}, 8) == ""


@given(st.lists(st.none() | st.floats(-1e6, 1e6)), st.integers(1, 50))
def test_a_curve_has_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) <= min(width, len(values))


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1), st.integers(1, 80))
def test_a_bar_is_full_and_fair(parts: dict[str, float], width: int) -> None:
    drawn = bar(parts, width)
    total = sum(parts.values())
    assert len(drawn) == (width if total > 0 else 0)
    for name, value in parts.items():
        if total > 0:
            assert abs(drawn.count(name) - value / total * width) < 2


@pytest.mark.slow
def test_ctrl_c_ends_what_was_started_with_sigint_ignored(run: Path) -> None:
    """As a script starts `command &`, nohup a command, and some batch systems a job."""
    words = [sys.executable, "-m", "slurm_rlhf.cli", "status", str(run), "--watch"]
    with held(run):
        process = subprocess.Popen(
            ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (130, "slurm-rlhf: interrupted\n")

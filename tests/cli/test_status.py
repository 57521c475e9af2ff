"""`status`, with `--watch`, and `cancel` on run directories, with a `scontrol` and a `scancel` of the test's own."""

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
from loaded_packages import LIBRARIES, packages_loaded
from programs import write_program
from waiting import HANG_S, until

from slurm_rlhf.cli.main import main
from slurm_rlhf.cli.status import sparkline, status_of
from slurm_rlhf.cluster.processes import Session
from slurm_rlhf.nodes.requeue import mark
from slurm_rlhf.observe.run_log import SERVER_AWAITED
from slurm_rlhf.observe.run_status import Summary
from slurm_rlhf.wire import timeouts

SHOWN = (
    "JobId=12 JobName=a JobState={state} Reason={reason} Restarts=1 ExitCode={code} EndTime={end} "
    "NodeList=gpu[001-002] StdOut={log}"
)
COMMAND = [sys.executable, "-c", "import sys; from slurm_rlhf.cli.main import main; sys.exit(main())"]


class Bench:
    """A run of job 12 and what slurmctld would say of it. `calls` are the commands that were asked."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.run_dir, self.bin, self.log = root / "run", root / "bin", root / "job.log"
        (self.run_dir / "logs").mkdir(parents=True)
        Session("gpu001", 77, 0.0, "12", "", "gpu001").write(self.run_dir)
        self.log.write_text(f"job 12 on gpu001, gpu002, run directory {self.run_dir}\nhello\n")

    def says(self, state: str, reason: str = "None", code: str = "0:0", end: str = "Unknown") -> None:
        shown = SHOWN.format(state=state, reason=reason, code=code, end=end, log=self.log)
        self.program("scontrol", f"echo '{shown}'")

    def program(self, name: str, script: str) -> None:
        write_program(self.bin / name, f'#!/bin/sh\necho "{name} $@" >>{self.bin}/calls\n{script}\n')

    def shown(self, word: object = None) -> str:
        """Return what `status` prints of the run, or of `word`."""
        assert main(["status", str(word or self.run_dir)]) == 0
        return self.capsys.readouterr().out

    @property
    def calls(self) -> list[str]:
        file = self.bin / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def wrote(self, status: str, steps: int, error: str = "", step_s: float = 2.0) -> None:
        summary = {"status": status, "steps": steps, "total_steps": 10, "error": error}
        (self.run_dir / "summary.json").write_text(json.dumps(summary))
        rows = [{"step": n, "reward": n / 8, "time/step": step_s} for n in range(1, steps + 1)]
        (self.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    bench = Bench(tmp_path, capsys)
    monkeypatch.setenv("PATH", f"{bench.bin}:/usr/bin:/bin")
    return bench


def test_a_job_that_waits_has_a_place_in_its_queue(bench: Bench) -> None:
    bench.says("PENDING Partition=gpu StartTime=2026-03-02T18:20:00", "Priority")
    bench.wrote("stopped", 4)
    bench.program("squeue", "echo 7; echo 12; echo 30")
    out = bench.shown(12)
    assert "queue       2 of 3 that wait in gpu, by priority" in out
    assert "start       Slurm expects it on Mon 02 Mar at 18:20, or earlier when others end early" in out
    assert bench.calls == ["scontrol show job -o 12", "squeue -h -t PENDING -p gpu -S -p,i -o %F"]

    bench.says("PENDING Partition=gpu StartTime=Unknown", "Priority")
    bench.program("squeue", "exit 1")
    out = bench.shown(12)
    assert "PENDING: it waits in the queue" in out
    assert "queue  " not in out
    assert "start  " not in out

    bench.says("PENDING", "BeginTime")
    out = bench.shown()
    assert "BeginTime: its time to begin has not come; after a requeue that takes about two minutes" in out
    assert "run         " in out
    assert ": stopped\n" in out


def test_a_run_that_goes_on(bench: Bench) -> None:
    bench.says("RUNNING", end="2020-01-01T00:00:00")
    bench.wrote("running", 4)
    for word in (bench.run_dir, 12):
        out = bench.shown(word)
        assert "job         12 on gpu[001-002]: RUNNING: it runs\n            requeued 1 times" in out
        assert "look inside srun --jobid=12 --overlap --pty --nodes=1 --nodelist=gpu001 bash" in out
        assert f"run         {bench.run_dir}: running\n" in out
        assert "step        4/10, reward 0.5\n" in out
        assert "pace        2 s a step, the last one 0:00 ago\n" in out
        assert "left        0:12, until " in out
        assert "its allocation ends before, Wed 00:00" in out
    assert bench.calls == ["scontrol show job -o 12"] * 2  # one call of the controller for each question
    event = {"event": "warning", "at": 0.0, "step": 4, "text": f"{SERVER_AWAITED}: gone"}
    (bench.run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    out = bench.shown(12)
    assert ("paused      the run waits for a server: gone" in out, "left " in out) == (True, False)


def test_a_run_that_starts_says_what_it_does(bench: Bench) -> None:
    bench.says("RUNNING")
    for steps in (0, 4):  # 4: resumed; the pace of the start before says nothing of this one
        bench.wrote("running", steps)
        summary = bench.run_dir / "summary.json"
        said = {"starting": "loading actor, critic; starting 2 engines"}
        summary.write_text(json.dumps(json.loads(summary.read_text()) | said))
        out = bench.shown()
        assert f"step        {steps}/10" in out
        assert "starting    loading actor, critic; starting 2 engines (0:0" in out
        assert "pace  " not in out
        assert "left  " not in out
    bench.says("NODE_FAIL")
    out = bench.shown()
    assert "it was cut off in the middle" in out
    assert "starting    " not in out


CLOSED_BY_PEER = """step 4
Traceback (most recent call last):
  File "slurm_rlhf/trainer/optimizer_step.py", line 40, in step
    dist.all_reduce(total)
RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:4417
"""
"""Log of a rank whose collective fails before it misses the conductor: another rank has left."""


def test_a_job_whose_first_node_is_gone(bench: Bench) -> None:
    """First the ranks alone know it, and when Slurm does, too, it lets a job with --no-kill go on without a script."""
    bench.says("RUNNING BatchHost=gpu001")
    bench.wrote("running", 4)
    left, stays = (bench.run_dir / "logs" / f"actor.{node}.log" for node in ("gpu002.1", "gpu003.2"))
    left.write_text("step 4\nthe conductor is gone: nothing was heard of it for 12 s\n")
    stays.write_text("step 4\n")
    (bench.run_dir / "logs" / "conductor.gpu001.0.log").write_text("step 4\n")
    assert f"run         {bench.run_dir}: running\n" in bench.shown()
    stays.write_text("RoleDied: actor rank 2: the conductor at tcp://n:1 is lost: it was not heard from for 12 s\n")
    failed = bench.run_dir / "logs" / "actor.gpu003.3.log"
    failed.write_text(CLOSED_BY_PEER + "step 5\n")
    assert f"run         {bench.run_dir}: running\n" in bench.shown()
    failed.write_text(CLOSED_BY_PEER)
    out = bench.shown()
    assert f"{bench.run_dir}: the conductor is gone: its ranks on gpu002, gpu003 say so, and have ended" in out
    assert "scontrol requeue" not in out
    bench.says("RUNNING BatchHost=gpu009")
    out = bench.shown()
    assert "its first node gpu009 is gone, and with it the conductor: no process leads the run.\n" in out
    assert "Another node that had an engine requeues the job within a minute" in out
    assert "If no node does that: scontrol requeue 12\n" in out


def test_who_has_ended_a_job_without_its_first_node(bench: Bench) -> None:
    """`Restarts` is 1: the start that another node has requeued was the one before, a cancelled one is the last."""
    bench.wrote("running", 4)
    (bench.run_dir / ".control").mkdir()
    said = "the conductor is gone: nothing was heard of it for 12 s\n"
    (bench.run_dir / "logs" / "actor.gpu002.1.log").write_text(said)
    for state, restarts, words in (("PENDING", 0, "has requeued it"), ("CANCELLED", 1, "has cancelled it")):
        bench.says(state)
        assert words not in bench.shown()
        assert "the conductor is gone: its ranks" not in bench.shown()
        mark(bench.run_dir, "12", restarts).write_text(f"its first node gpu001 was down: gpu002 {words}\n")
        assert f"            its first node gpu001 was down: gpu002 {words}\n" in bench.shown()


@pytest.mark.parametrize(("state", "code"), [("NODE_FAIL", "1:0"), ("OUT_OF_MEMORY", "0:125"), ("TIMEOUT", "0:15")])
def test_a_run_that_was_cut_off_shows_the_newest_logs(bench: Bench, state: str, code: str) -> None:
    bench.says(state, code=code)
    bench.wrote("running", 4)
    (bench.run_dir / "logs" / "critic.gpu002.0.log").write_text("CUDA error: out of memory\n")
    out = bench.shown()
    assert f": {state}: it " in out
    assert "it was cut off in the middle and could not say why; checkpoints are intact" in out
    assert "    CUDA error: out of memory\n" in out
    assert "    hello\n" in out
    assert "left  " not in out


def test_a_run_that_failed_shows_its_own_last_words(bench: Bench) -> None:
    bench.says("FAILED", code="1:0")
    bench.wrote("failed", 4, "role critic died: rank 0 on gpu002 is lost.\nThe last lines of x:\n    boom")
    out = bench.shown()
    assert "FAILED: it ended with an exit code that is not 0 (exit code 1)" in out
    assert out.endswith("error: role critic died: rank 0 on gpu002 is lost.\nThe last lines of x:\n    boom\n")


def test_a_job_that_slurmctld_has_forgotten(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    bench.wrote("finished", 10)
    assert "12: slurmctld has forgotten it (MinJobAge), so it is over" in bench.shown()
    assert main(["status", "12"]) == 2
    assert "Give the run directory instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scontrol", "stated"),
    [
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm controller"),
        (f"exec sleep {HANG_S}", "scontrol had no answer within 0.3 s"),  # it tries for 18 s
    ],
)
def test_without_a_controller_the_directory_still_tells(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, scontrol: str, stated: str
) -> None:
    assert timeouts.SLURM_STATUS_S <= 5
    monkeypatch.setattr(timeouts, "SLURM_STATUS_S", 0.3 if "sleep" in scontrol else HANG_S)
    bench.program("scontrol", scontrol)
    bench.wrote("running", 4)
    out = bench.shown()
    assert f"slurmctld says nothing about job 12: {stated}" in out
    assert f"run         {bench.run_dir}: running\n" in out
    assert "step        4/10" in out


def test_cancel_calls_scancel_once_or_leaves_a_file(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.says("RUNNING")
    bench.program("scancel", "")
    assert main(["cancel", str(bench.run_dir)]) == 0
    assert capsys.readouterr().out == "job 12 is cancelled\n"
    assert bench.calls == ["scontrol show job -o 12", "scancel 12"]
    assert main(["cancel", str(bench.run_dir), "--save-first"]) == 0
    assert (bench.run_dir / "stop").exists()
    assert len(bench.calls) == 3
    bench.says("COMPLETED")
    assert main(["cancel", "12"]) == 0
    assert "nothing to cancel: job 12 is over" in capsys.readouterr().out
    bench.says("RUNNING")
    bench.program("scancel", "echo 'Access/permission denied' >&2; exit 1")
    assert main(["cancel", "12"]) == 1
    assert "Access/permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "cancel"])
@pytest.mark.parametrize("words", [[], ["a", "b"], ["--what"], ["/nowhere"]])
def test_bad_words(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("slurm-rlhf: error: ")
    assert "Traceback" not in err
    assert main(["status", "--watch"]) == 2
    assert "usage: slurm-rlhf status RUN [--watch]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--help"], ["status", "RUN"], ["cancel", "RUN"], ["submit", "-h"], ["plan", "x.toml"]]
)
def test_commands_that_need_no_torch_do_not_load_it(bench: Bench, words: list[str]) -> None:
    bench.says("RUNNING")
    bench.program("scancel", "")
    bench.wrote("running", 4)
    words = [str(bench.run_dir) if word == "RUN" else word for word in words]
    assert not LIBRARIES & packages_loaded([*COMMAND, *words])


SUMMARY = Summary("running", 0, 4, None, None, None, None, 1.0, 2.0, 0, {"actor": 1}, 1)


def row(step: int) -> dict[str, Any]:
    times = {"time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5, "time/sync": 0.5}
    engines = {"perf/engine/0/tokens_per_s": 900.0, "perf/engine/1/tokens_per_s": 300.0}
    return {"step": step, "reward": step / 4, **times, **engines}


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


def test_a_frame_has_status_curve_phases_and_engines(run: Path) -> None:
    finish(run)
    lines, over = status_of(str(run), curves=True)
    assert over
    text = "\n".join(lines)
    assert f"{run}: finished" in text
    assert "step        4/4, reward 1" in text
    assert "reward      ▁▃▆█  0.25 to 1 in 4 steps" in text
    assert "last step   rollout 1 s, update 0.5 s, sync 0.5 s" in text
    assert "1200 tokens/s, the slowest is engine 1 with 300" in text


@pytest.mark.slow
def test_into_a_pipe_each_frame_follows_the_last_until_the_run_is_over(run: Path) -> None:
    with held(run):
        command = [sys.executable, "-m", "slurm_rlhf.cli", "status", str(run), "--watch"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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


def test_curves_of_characters() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([3, 3, 3], 10) == "▅▅▅"
    assert sparkline([1, None, math.nan, 2], 9) == "▁  █"
    assert sparkline([], 5) == sparkline([None, math.inf], 5) == ""


@given(st.lists(st.none() | st.floats(-1e6, 1e6)), st.integers(1, 50))
def test_a_curve_has_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) <= min(width, len(values))


def test_ctrl_c_ends_what_was_started_with_sigint_ignored(run: Path) -> None:
    """SIGINT is ignored where a script starts `command &`, under nohup, and in some batch systems."""
    words = [sys.executable, "-m", "slurm_rlhf.cli", "status", str(run), "--watch"]
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words]
    with held(run):
        process = subprocess.Popen(ignoring, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (130, "slurm-rlhf: interrupted\n")

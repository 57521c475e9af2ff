"""Requests to stop a run: signals, the clock, files; and where the run listens for them."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, until

from slurm_rlhf.cluster import stop as stop_module
from slurm_rlhf.cluster.stop import END, FILE, HANGUP, INTERRUPT, TERM, USR1, Stop, StopRequested


def interrupted(stop: Stop) -> StopRequested:
    """The stop that ended a long wait that may be dropped."""
    with pytest.raises(StopRequested) as raised, stop.droppable():
        threading.Event().wait(HANG_S)
    return raised.value


def later(seconds: float, number: signal.Signals) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def test_the_clock_alone_stops_a_run_before_its_allocation_ends(tmp_path: Path) -> None:
    with Stop(tmp_path, end=time.time() + 601, margin_s=600) as stop:
        assert stop.reason is None
        stopped = interrupted(stop)
    assert stopped.reason is END
    assert (END.requeue, END.exit_code) == (True, 0)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGUSR1, USR1), (signal.SIGTERM, TERM)])
def test_a_signal_drops_what_may_be_dropped_and_waits_elsewhere(
    tmp_path: Path, number: signal.Signals, reason: object
) -> None:
    with Stop(tmp_path) as stop:
        later(0.2, number)
        assert interrupted(stop).reason is reason
    with Stop(tmp_path) as stop:
        with stop.droppable():
            pass
        os.kill(os.getpid(), number)
        time.sleep(0.1)  # a training step goes on
        with pytest.raises(StopRequested):
            stop.check()
        with pytest.raises(StopRequested), stop.droppable():
            pytest.fail("what may be dropped must not begin")
    assert (USR1.requeue, TERM.requeue) == (True, False)


def test_a_signal_that_a_wait_has_missed_is_repeated(tmp_path: Path) -> None:
    """A signal may come between the beginning of a wait in Python and that of the system call."""
    with Stop(tmp_path) as stop:
        threading.Timer(0.1, setattr, (stop, "reason", TERM)).start()
        assert interrupted(stop).reason is TERM


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGUSR1, USR1), (signal.SIGTERM, TERM), (signal.SIGINT, INTERRUPT)]
)
def test_a_signal_that_another_thread_took_ends_a_wait(tmp_path: Path, number: signal.Signals, reason: object) -> None:
    """A signal that comes while the main thread is about to wait ends it, too: the wait itself is not interrupted."""
    with Stop(tmp_path) as stop:
        threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), number)).start()
        stopped = interrupted(stop)
    assert stopped.reason is reason


def test_the_wakeup_of_signals_is_left_as_it_was(tmp_path: Path) -> None:
    with Stop(tmp_path):
        pass
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
    while any(thread.name == "stop-watch" for thread in threading.enumerate()):
        time.sleep(0.01)


@pytest.mark.slow
def test_sigterm_after_sigusr1_means_that_nothing_is_to_go_on(tmp_path: Path) -> None:
    """`scancel` sends SIGTERM while a run saves; a second one, later, ends the process."""
    with Stop(tmp_path) as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.reason is TERM
        time.sleep(2.1)
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)


def test_ctrl_c_saves_and_a_second_one_ends_the_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this process has inherited
    with Stop(tmp_path) as stop:
        later(0.1, signal.SIGINT)
        assert interrupted(stop).reason is INTERRUPT
        assert "the run saves and ends; press it again to end it at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # while it saves
    assert (INTERRUPT.requeue, INTERRUPT.exit_code) == (False, 130)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


EARLY = """
import os, pathlib, signal, sys
from slurm_rlhf.cli import main

def dispatch(words):
    from slurm_rlhf.cluster.stop import Stop, StopRequested
    os.kill(os.getpid(), signal.SIGUSR1)  # during preflight
    for _ in range(2):
        with Stop(pathlib.Path({directory!r})) as stop:
            print(stop.reason and stop.reason.what)
    return 0

main._dispatch = dispatch
sys.exit(main.main([]))
"""


def test_sigusr1_before_a_run_begins_is_noted_for_it(tmp_path: Path) -> None:
    program = EARLY.format(directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, [USR1.what, "None"]), done.stderr


SENT_AT_THE_END = """
import os, signal
from slurm_rlhf.cluster.stop import note_early


class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
        kill(pid, number)


note_early()
last = Last()
"""


def test_sigusr1_while_the_interpreter_ends_changes_no_exit_code() -> None:
    assert subprocess.run([sys.executable, "-c", SENT_AT_THE_END], check=False, timeout=HANG_S).returncode == 0


HUNG_UP = """
import pathlib, signal, sys, threading
from slurm_rlhf.cluster.stop import Stop, StopRequested

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever this process has inherited
directory = pathlib.Path(sys.argv[1])
try:
    with Stop(directory) as stop, stop.droppable():
        (directory / "ready").touch()
        threading.Event().wait(float(sys.argv[2]))
except StopRequested as stopped:
    print("saving", flush=True)
    print("an error", file=sys.stderr, flush=True)
    (directory / "saved").write_text(f"{stopped.reason.what} {stopped.reason.exit_code}")
"""


def test_a_terminal_that_is_gone_means_save_and_leave(tmp_path: Path) -> None:
    """The terminal goes when `salloc` or ssh is closed: nothing can be printed any more, and the work is saved."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", HUNG_UP, str(tmp_path), str(HANG_S)])
    try:
        until((tmp_path / "ready").exists, "the start")
        os.close(terminal)
        _, status = until(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found, "the end")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "saved").read_text() == f"{HANGUP.what} 129"


def test_nohup_counts(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(tmp_path) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_files_of_this_session_are_obeyed_once(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()  # left by an earlier session
    with Stop(tmp_path) as stop:
        assert not stop.save_wanted()
        (tmp_path / "save").touch()
        assert [stop.save_wanted(), stop.save_wanted()] == [True, False]
        threading.Timer(0.2, (tmp_path / "stop").touch).start()
        stopped = interrupted(stop)
    assert stopped.reason is FILE
    assert not FILE.requeue


def test_whoever_ends_what_was_started_ignores_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop(tmp_path) as stop:
        stop.ignore_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        assert stop.reason is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_look_that_the_file_system_does_not_answer_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks fail for a while after a hiccup of NFS, and the file is seen as soon as one succeeds."""
    monkeypatch.setattr(stop_module, "_POLL_S", 0.01)
    look, failed = os.stat, threading.Event()

    def failing(path: Any, **words: Any) -> os.stat_result:
        if Path(path).name == "stop" and not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, **words)

    with Stop(tmp_path) as stop:
        monkeypatch.setattr(os, "stat", failing)
        assert failed.wait(HANG_S)
        (tmp_path / "stop").touch()
        assert interrupted(stop).reason is FILE


def test_a_clock_that_is_set_neither_stops_a_run_nor_lets_it_miss_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_module, "_POLL_S", 0.01)
    right = time.time
    with Stop(tmp_path, end=right() + 3600, margin_s=600) as stop:
        monkeypatch.setattr(time, "time", lambda: right() + 7200)
        time.sleep(0.2)
        assert stop.reason is None
    with Stop(tmp_path, end=time.time() + 600.2, margin_s=600) as stop:
        monkeypatch.setattr(time, "time", lambda: right() - 7200)
        assert interrupted(stop).reason is END

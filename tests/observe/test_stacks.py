"""Stacks of a process: taken inside it, by an interrupted thread; and how long a phase may stand still."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from waiting import HANG_S

from slurm_rlhf.observe.stacks import (
    MAIN,
    Frame,
    ThreadStack,
    last_late_dump,
    own_stacks,
    read_stacks,
    written,
)
from slurm_rlhf.observe.timing import FACTOR, LEARNED, UNKNOWN, UNSURE, WaitBudgets

HOLDS = """
import ctypes, subprocess, sys, threading
from slurm_rlhf.observe.stacks import LateStacks
wait = threading.Thread(target=threading.Event().wait, daemon=True)
wait.start()
print("words of before")
sys.stdout.flush()

def inner():
    assert ctypes.PyDLL(None).waitpid(child.pid, None, 0) == child.pid  # PyDLL keeps the interpreter's lock

late = LateStacks()
child = subprocess.Popen(["sleep", "2"])
late.put_off(0.2)
inner()
late.stop()
print("words of after", file=sys.stderr)
child = subprocess.Popen(["sleep", "2"])
late.put_off(60)
late.put_off(0.2, [wait])
inner()
"""

RUNS = """
import sys, threading, time
from slurm_rlhf.observe.stacks import LateStacks
late = LateStacks()

def deep(left):
    return deep(left - 1) if left else 0

def work():
    while True:
        deep(300)  # its frames take memory, and give it back at once

threading.Thread(target=work, name="groups", daemon=True).start()
end = time.monotonic() + 2
while time.monotonic() < end:
    late.put_off(0.001, threading.enumerate())
    until = time.monotonic() + 0.01
    while time.monotonic() < until:
        deep(300)
late.stop()
print("alive")
"""

CALLS = """
import os, time
from slurm_rlhf.observe.stacks import LateStacks
late = LateStacks()
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
end = time.monotonic() + 5
while time.monotonic() < end:
    late.put_off(1e-5)
    for _ in range(3):
        list(map(lambda x: x, range(20)))
late.stop()
print("alive")
"""


def test_own_stacks_begin_with_the_main_thread_and_have_names() -> None:
    leave = threading.Event()
    other = threading.Thread(target=leave.wait, name="reward", daemon=True)
    other.start()
    found = own_stacks()
    leave.set()
    assert found[0].name == MAIN
    assert any(
        frame.function == "test_own_stacks_begin_with_the_main_thread_and_have_names" for frame in found[0].frames
    )
    (reward,) = (thread for thread in found if thread.name == "reward")
    assert reward.frames[0].function == "wait"
    assert read_stacks(written(found)) == found


@pytest.mark.slow
def test_a_thread_writes_its_stack_while_a_call_into_c_holds_the_interpreters_lock() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS], capture_output=True, text=True, check=True, timeout=HANG_S)
    main, after, other = done.stderr.partition("words of after\n")
    assert after
    (thread,) = read_stacks(last_late_dump(f"{done.stdout}{main}"))
    assert thread == ThreadStack(MAIN, (Frame("<string>", 10, "inner"), Frame("<string>", 15, "<module>")))
    assert other.count("Stack (most recent call first):") == 1  # the main thread's was stopped
    assert "in wait" in other


@pytest.mark.slow
def test_a_process_that_runs_when_its_stacks_are_due_goes_on() -> None:
    """A thread that reads the frames of running threads ends this process by SIGSEGV within a second."""
    done = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]
    assert done.stderr.count("in deep") > 100


@pytest.mark.slow
def test_no_thread_reads_its_stack_while_a_call_begins() -> None:
    """C that calls Python makes a frame known before its fields are written: a signal handler dies of it."""
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_only_the_last_dump_of_a_log_counts() -> None:
    one = 'Stack (most recent call first):\n  File "a.py", line 1 in f\n'
    two = one.replace("a.py", "b.py")
    (thread,) = read_stacks(last_late_dump(f"{one}much else\n{two}"))
    assert thread.name == MAIN
    assert thread.frames[0].file == "b.py"
    assert last_late_dump("nothing of the kind") == ""


def test_a_dump_after_which_the_process_has_gone_on_says_nothing() -> None:
    """A long import is written down, too; a node that dies a minute later has not died in it."""
    dump = 'Stack (most recent call first):\n  File "a.py", line 1 in f\n'
    assert last_late_dump(f"before\n{dump}\n")
    assert last_late_dump(f"{dump}starting to load\n") == ""


def test_a_budget_is_wide_until_the_phase_is_known_and_never_above_the_ceiling() -> None:
    budgets = WaitBudgets(30.0)
    for passed in range(LEARNED):
        now = budgets.of("update", 900.0)
        assert (now.seconds, now.ends_s) == ((UNSURE * FACTOR * 7.0, 0.0) if passed else (UNKNOWN * 30.0, 900.0))
        assert budgets.of("update", 50.0).seconds == 50.0
        for wait in (2.0, 7.0, 1.0):
            budgets.waited("update", wait)
        budgets.passed("update")
    assert budgets.of("update", 900.0).seconds == FACTOR * 7.0
    assert budgets.of("update", 50.0).seconds == 50.0
    assert budgets.of("rollout", 900.0).usual_s is None
    assert budgets.of("start", 900.0, once=True).seconds == 900.0


def test_a_budget_has_a_floor_and_one_long_wait_does_not_widen_it() -> None:
    budgets = WaitBudgets(30.0)
    for wait in (0.1, 0.1, 60.0, 0.1, 0.1):
        budgets.waited("sync", wait)
        budgets.passed("sync")
    assert budgets.of("sync", 900.0).seconds == 30.0
    assert budgets.of("sync", 900.0).usual_s == pytest.approx(0.1)

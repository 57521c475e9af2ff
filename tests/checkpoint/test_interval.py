"""How often to save: the formula and its bounds, what a run's events say of its failures, and when a save is due."""

from __future__ import annotations

import math

import pytest

from slurm_rlhf.checkpoint.directory import Failures, best_interval, failures, in_steps, span
from slurm_rlhf.observe.run_log import CHECKPOINT, ERROR, FINISH, REQUEUE, RESTART, RESUME, START, STOP, RunEvent
from slurm_rlhf.run.run_state import SaveCadence

HOUR = 3600.0


def lost(interval: float, cost: float, mtbf: float) -> float:
    """The share of the time that saving and failures take."""
    return cost / interval + interval / (2 * mtbf)


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, HOUR), (30.0, 20 * HOUR), (0.1, 300.0)])
def test_no_other_interval_loses_less(cost: float, mtbf: float) -> None:
    best = best_interval(cost, cost, mtbf)
    assert best == pytest.approx(math.sqrt(2 * cost * mtbf))
    assert all(lost(best, cost, mtbf) < lost(best * factor, cost, mtbf) for factor in (0.5, 0.9, 1.1, 2.0))


def test_it_is_bounded() -> None:
    assert best_interval(1.0, 1.0, 6000 * HOUR) == HOUR  # no more work than an hour is at stake
    assert best_interval(600.0, 600.0, 6000 * HOUR) == 12_000.0  # unless saving took more than a 20th of the time
    assert best_interval(0.01, 90.0, 10.0) == 90.0  # one write is over before the next begins
    assert best_interval(100.0, 100.0, 1.0) == 100.0
    assert (in_steps(100.0, 30.0), in_steps(1.0, 30.0), in_steps(1.0, 2e-3)) == (3, 1, 500)


def events(*sessions: str) -> list[RunEvent]:
    """Sessions of 100 s that do 5 steps each, and how each ended; "" is SIGKILL."""
    found = []
    for number, end in enumerate(sessions):
        begin = 1000.0 * number
        found.append(RunEvent(RESUME if number else START, begin, 0, ""))
        found.append(RunEvent(CHECKPOINT, begin + 90.0, 5, ""))
        if end:
            found.append(RunEvent(end, begin + 100.0, 5, ""))
    return found


def test_failures_are_sessions_that_could_not_save() -> None:
    calm = failures(events(STOP, FINISH, ""), 40, 6000.0)
    assert (calm.stops, calm.mtbf_s) == (0, 150 * HOUR)
    assert "150 h between failures: ckpt.mtbf_hours = 6000 over 40 nodes" in calm.words()
    stormy = failures(events(ERROR, "", STOP, ""), 40, 6000.0)
    assert (stormy.stops, stormy.observed_s) == (2, 380.0)  # the session under way included
    assert stormy.mtbf_s == 190.0
    assert stormy.words() == "3.2 min between failures: this run had 2 in 6.3 min"
    mended = [*events(""), RunEvent(RESTART, 200.0, 7, "actor rank 1 died")]
    assert failures(mended, 40, 6000.0).mtbf_s == 200.0
    requeued = events(STOP, "")
    requeued.insert(3, RunEvent(REQUEUE, 101.0, 5, ""))
    assert failures(requeued, 1, 1.0).stops == 0


def test_a_session_that_did_no_step_has_lost_none() -> None:
    begun = [RunEvent(START, 0.0, 0, ""), RunEvent(ERROR, 9.0, 0, "a reward function that is not there")]
    assert failures([*begun, *events("")], 1, 1.0).stops == 0
    assert failures([], 2, 1.0).mtbf_s == 0.5 * HOUR


@pytest.mark.parametrize(("seconds", "text"), [(0.0283, "0.028 s"), (33, "33 s"), (150, "2.5 min"), (90_000, "25 h")])
def test_times_are_read_easily(seconds: float, text: str) -> None:
    assert span(seconds) == text


class Clocked:
    """A run whose steps take 10 s and whose saves keep it waiting for 2 s."""

    def __init__(self, every: int | str, mtbf_hours: float = 1.0) -> None:
        self.now, self.notes = 0.0, list[str]()
        self.cadence = SaveCadence(every, Failures(0, 0.0, 1, mtbf_hours), self.notes.append, lambda: self.now)  # type: ignore[arg-type]

    def go(self, steps: range) -> list[int]:
        saved = []
        self.cadence.begin()
        for step in steps:
            self.now += 10.0
            if self.cadence.due(step):
                saved.append(step)
                self.cadence.begun(step)
                self.now += 2.0
                self.cadence.saved(2.0, 2.0)
            self.cadence.begin()
        return saved


def test_every_so_many_steps() -> None:
    assert Clocked(20).go(range(1, 61)) == [20, 40, 60]
    assert Clocked(20).go(range(30, 61)) == [40, 60]
    assert Clocked(0).go(range(1, 61)) == []
    assert Clocked(20).notes == []


def test_auto_saves_early_once_and_then_as_is_best() -> None:
    run = Clocked("auto")
    assert run.go(range(1, 40)) == [2, 14, 26, 38]  # sqrt(2 * 2 s * 1 h) = 120 s
    (note,) = run.notes
    assert note == (
        "ckpt.save_steps = auto: a checkpoint every 12 steps (2.0 min): a step takes 10 s, a save keeps the run "
        "waiting for 2 s and is on disk after 2 s; 60 min between failures: ckpt.mtbf_hours = 1 over 1 node"
    )

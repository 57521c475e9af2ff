"""Checkpoints that are written beside the steps, with roles whose writing the test holds up."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from steps import make_step
from waiting import HANG_S, until

from slurm_rlhf.algorithms.policy_distance import KLController
from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.checkpoint.interval import failures
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CheckpointError, RoleDied
from slurm_rlhf.run.run_state import RunCheckpoints, RunState, SaveCadence


class Trainer:
    """A role of one rank, whose state is a number; it writes when it is let."""

    world = 1

    def __init__(self) -> None:
        self.state = 0
        self.calls: list[str] = []
        self.free = threading.Event()
        self._written: Future[None] = Future()
        self.error: Exception | None = None

    def start_all(self, method: Any, request: Any) -> list[Future[Any]]:
        self.calls.append(f"{method.__name__}{' behind' * request.behind}")
        done: Future[Any] = Future()
        file, copied = Path(request.path, "state"), str(self.state)
        if not request.behind:
            file.write_text(copied)
        else:
            self._written = Future()
            threading.Thread(target=self._write, args=(file, copied, self._written), daemon=True).start()
        done.set_result(None)
        return [done]

    def _write(self, file: Path, copied: str, written: Future[None]) -> None:
        assert self.free.wait(HANG_S)
        if self.error is None:
            file.write_text(copied)
            written.set_result(None)
        else:
            written.set_exception(self.error)

    def written(self, rank: int) -> Future[None]:
        return self._written

    def call_all(self, method: Any) -> list[None]:
        self.calls.append(method.__name__)
        self.free.set()
        return [None]


@pytest.fixture
def actor() -> Trainer:
    return Trainer()


@pytest.fixture
def told() -> list[tuple[int, float, float]]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, actor: Trainer, told: list[tuple[int, float, float]]) -> RunCheckpoints:
    step = make_step(Config(run_dir=str(tmp_path)), {"actor": actor}, kl=KLController(0.0))
    cadence = SaveCadence(1, failures([], 1, 1.0), lambda text: None)

    def saved(*found: Any) -> None:
        told.append(found)

    return RunCheckpoints(
        CheckpointDir(tmp_path),
        2,
        step.roles,
        RunState(seed=0),
        step,
        saved,
        cadence,
        time.monotonic(),
    )


def train(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    checkpoints.state.step += 1
    actor.state = checkpoints.state.step


def test_it_holds_the_state_of_its_step_and_is_whole_when_all_is_written(
    checkpoints: RunCheckpoints, actor: Trainer, told: list[tuple[int, float, float]]
) -> None:
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    train(checkpoints, actor)
    checkpoints.poll()
    assert checkpoints.directory.latest() is None  # a kill now finds what was there before
    assert told == []
    actor.free.set()
    until(checkpoints.directory.latest)
    until(lambda: checkpoints.poll() or told)
    path = checkpoints.directory.of(1)
    assert (path / "actor" / "state").read_text() == "1"
    assert checkpoints.directory.load_state(path)["run"]["step"] == 1
    ((step, seconds, waited),) = told
    assert step == 1
    assert waited < seconds
    assert actor.calls == ["save behind"]


def test_the_next_one_waits_for_it_and_so_do_a_stop_and_the_end(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    assert checkpoints.directory.latest() == checkpoints.directory.of(1)
    assert "time/checkpoint_wait" in checkpoints.step.phases.take()
    checkpoints.save_once()
    assert checkpoints.directory.latest() == checkpoints.directory.of(2)
    train(checkpoints, actor)
    checkpoints.save_once()  # beside nothing: it is written at once
    assert (checkpoints.directory.of(3) / "actor" / "state").read_text() == "3"
    assert actor.calls[:3] == ["save behind", "finish_save", "save behind"]
    assert actor.calls[-1] == "save"


def test_a_full_disk_ends_the_run_as_it_does_when_it_waits(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    actor.free.set()
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    checkpoints.finish()
    actor.error = OSError(errno.ENOSPC, "No space left on device")
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    good = checkpoints.directory.of(1)
    with pytest.raises(CheckpointError, match=f"checkpoint 2 could not be written.*No space left.*{good}"):
        until(checkpoints.poll)
    assert checkpoints.directory.latest() == good
    actor.error = None
    train(checkpoints, actor)
    checkpoints.save_once()
    assert checkpoints.directory.latest() == checkpoints.directory.of(3)


def test_a_run_that_fails_keeps_what_was_being_written(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    checkpoints.abandon(0.01)  # nobody writes: it does not wait for ever
    assert checkpoints.directory.latest() is None
    threading.Timer(0.05, actor.free.set).start()
    checkpoints.abandon(20.0)
    assert checkpoints.directory.latest() == checkpoints.directory.of(1)


def test_a_trainer_that_dies_while_it_writes_leaves_the_one_before(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    actor.free.set()
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    checkpoints.finish()
    actor.error = RoleDied("actor rank 0 is lost")
    train(checkpoints, actor)
    checkpoints.save(behind=True)
    checkpoints.abandon(20.0)  # what ended the run counts
    assert checkpoints.directory.latest() == checkpoints.directory.of(1)

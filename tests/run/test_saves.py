"""Checkpoints of a run: written during the next steps, and the best one kept."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from evaluated_runs import Engines, make, rows
from steps import make_step
from waiting import HANG_S, until

from slurm_rlhf.algorithms.losses import KLController
from slurm_rlhf.checkpoint.directory import CheckpointDir, failures
from slurm_rlhf.checkpoint.resume import latest, load_state
from slurm_rlhf.cluster.stop import STOP_FILE, Stop, StopRequested
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CheckpointError, RoleDied
from slurm_rlhf.eval.sets import Sample
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.run.loop import TrainingLoop
from slurm_rlhf.run.run_state import Best, RunCheckpoints, RunState, SaveCadence, better, resumed


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
        self.calls.append(f"{method.__name__}{' async' * request.async_save}")
        done: Future[Any] = Future()
        file, copied = Path(request.path, "state"), str(self.state)
        if not request.async_save:
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

    def ask(self, rank: int, method: Any) -> Future[None]:
        return self._written

    def call_all(self, method: Any) -> list[None]:
        self.calls.append(method.__name__)
        self.free.set()
        return [None]


@pytest.fixture
def actor() -> Trainer:
    return Trainer()


@pytest.fixture
def stated() -> list[tuple[int, float, float]]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, actor: Trainer, stated: list[tuple[int, float, float]]) -> RunCheckpoints:
    config = Config(run_dir=str(tmp_path))
    config.ckpt.max_num = 2
    step = make_step(config, {"actor": actor}, kl=KLController(0.0))
    cadence = SaveCadence(1, failures([], 1, 1.0), lambda text: None)

    def saved(*found: Any) -> None:
        stated.append(found)

    return RunCheckpoints(CheckpointDir(tmp_path), RunState(seed=0), step, saved, cadence, time.monotonic())


def train(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    checkpoints.state.step += 1
    actor.state = checkpoints.state.step


def begin_save(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    """Train a step, and go on while it is written."""
    train(checkpoints, actor)
    checkpoints.save(async_save=True)


def test_it_holds_the_state_of_its_step_and_is_whole_when_all_is_written(
    checkpoints: RunCheckpoints, actor: Trainer, stated: list[tuple[int, float, float]]
) -> None:
    begin_save(checkpoints, actor)
    train(checkpoints, actor)
    checkpoints.poll()
    assert latest(checkpoints.directory.root) is None  # a kill now finds what was there before
    assert stated == []
    actor.free.set()
    until(lambda: latest(checkpoints.directory.root))
    until(lambda: checkpoints.poll() or stated)
    path = checkpoints.directory.of(1)
    assert (path / "actor" / "state").read_text() == "1"
    assert load_state(path)["run"]["step"] == 1
    ((step, seconds, waited),) = stated
    assert step == 1
    assert waited < seconds
    assert actor.calls == ["save async"]


def test_the_next_one_waits_for_it_and_so_do_a_stop_and_the_end(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    begin_save(checkpoints, actor)
    begin_save(checkpoints, actor)
    assert latest(checkpoints.directory.root) == checkpoints.directory.of(1)
    assert "time/checkpoint_wait" in checkpoints.step.phases.take()
    checkpoints.save_once()
    assert latest(checkpoints.directory.root) == checkpoints.directory.of(2)
    train(checkpoints, actor)
    checkpoints.save_once()  # no step runs: it is written at once
    assert (checkpoints.directory.of(3) / "actor" / "state").read_text() == "3"
    assert actor.calls[:3] == ["save async", "finish_save", "save async"]
    assert actor.calls[-1] == "save"


def test_a_full_disk_ends_the_run_as_it_does_when_it_waits(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    actor.free.set()
    begin_save(checkpoints, actor)
    checkpoints.finish()
    actor.error = OSError(errno.ENOSPC, "No space left on device")
    begin_save(checkpoints, actor)
    good = checkpoints.directory.of(1)
    with pytest.raises(CheckpointError, match=f"checkpoint 2 could not be written.*No space left.*{good}"):
        until(checkpoints.poll)
    assert latest(checkpoints.directory.root) == good
    actor.error = None
    train(checkpoints, actor)
    checkpoints.save_once()
    assert latest(checkpoints.directory.root) == checkpoints.directory.of(3)


def test_a_run_that_fails_keeps_what_was_being_written(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    begin_save(checkpoints, actor)
    checkpoints.abandon(0.01)  # nobody writes: it does not wait for ever
    assert latest(checkpoints.directory.root) is None
    threading.Timer(0.05, actor.free.set).start()
    checkpoints.abandon(20.0)
    assert latest(checkpoints.directory.root) == checkpoints.directory.of(1)


def test_a_trainer_that_dies_while_it_writes_leaves_the_one_before(checkpoints: RunCheckpoints, actor: Trainer) -> None:
    actor.free.set()
    begin_save(checkpoints, actor)
    checkpoints.finish()
    actor.error = RoleDied("actor rank 0 is lost")
    begin_save(checkpoints, actor)
    checkpoints.abandon(20.0)  # its error is dropped: the one that ended the run counts
    assert latest(checkpoints.directory.root) == checkpoints.directory.of(1)


# --- best checkpoint --------------------------------------------------------------------------------------------------


CURVE = (0.5, 0.25, 0.75, 0.5, 0.75, 0.25, 0.5)
"""The score after so many steps: the third value, of step 2, is the best, and step 4 only equals it."""
STEPS = len(CURVE) - 1
METRIC = "eval/sums/mean"
SCORES = f"""
def reward_func(responses, step):
    return [{CURVE}[step]] * len(responses)
"""


def sample_alongside(engines: Engines) -> Sample:
    """Engines that take until the training is about to end; they hold the weights that were asked for all along."""

    def sample(prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        assert threading.current_thread() is not threading.main_thread()
        found = engines.sample(prompts, sampling, version)
        assert engines.version == version
        return found

    return sample


@pytest.fixture
def reward(tmp_path: Path) -> RewardFunction:
    (tmp_path / "reward.py").write_text(SCORES)
    return RewardFunction.load(str(tmp_path / "reward.py"))


@pytest.fixture(params=[None, sample_alongside], ids=["alone", "alongside"])
def run(request: pytest.FixtureRequest, tmp_path: Path, stop: Stop, reward: RewardFunction) -> Callable[..., Any]:
    """Makes a run, evaluated alone or during the training."""

    def made(**named: Any) -> TrainingLoop:
        given = {"steps": STEPS, "best_metric": METRIC, "alongside": request.param, **named}
        return make(tmp_path, stop, reward, **given)

    return made


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def scores(tmp_path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row[METRIC]) for row in rows(tmp_path)]


def test_the_best_is_kept_with_the_newest(
    tmp_path: Path, run: Callable[..., TrainingLoop], capsys: pytest.CaptureFixture[str]
) -> None:
    loop = run()
    loop.run()
    loop.reporting.finished()
    said = capsys.readouterr().out
    assert "evaluation before training, mean score: sums 0.5000 [0.5000, 0.5000]" in said
    assert "evaluation, mean score: 0.5000 before, 0.5000 after" in said
    assert f"best checkpoint by {METRIC}: 0.7500 at step 2, {tmp_path}/checkpoints/step_000002\n" in said
    assert scores(tmp_path) == [(step, CURVE[step]) for step in range(1, STEPS + 1)]
    assert kept(tmp_path) == ["step_000002", "step_000006"]  # ckpt.max_num = 1
    best = {"metric": METRIC, "value": 0.75, "step": 2}
    assert load_state(tmp_path / "checkpoints" / "step_000006")["best"] == best
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"] == {**best, "checkpoint": "checkpoints/step_000002"}
    assert (summary["eval_before"], summary["eval_after"]) == (0.5, 0.5)
    for step in range(STEPS + 1):
        figures = json.loads((tmp_path / "eval" / f"step_{step:06d}.json").read_text())
        assert (figures["step"], figures["eval"]) == (step, CURVE[step])
        lines = (tmp_path / "eval" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert [json.loads(line)["score"] for line in lines] == [CURVE[step]] * 4


@pytest.mark.parametrize("at", [1, 3, STEPS])
def test_a_stop_at_any_step_changes_nothing(
    tmp_path: Path, run: Callable[..., TrainingLoop], stop: Stop, at: int
) -> None:
    loop = run()
    take = loop.step.batches.take

    def stopped(number: int) -> Any:
        if number == at:
            (tmp_path / STOP_FILE).touch()
            threading.Event().wait(HANG_S)  # until the stop drops the step
        return take(number)

    loop.step.batches.take = stopped  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        loop.run()
    assert loop.state.step == at - 1
    stop.reason = None
    (tmp_path / STOP_FILE).unlink(missing_ok=True)
    again = run(resume=at > 1)
    again.run()
    assert scores(tmp_path) == [(step, CURVE[step]) for step in range(1, STEPS + 1)]
    assert again.checkpoints.best == Best(METRIC, 0.75, 2)
    assert kept(tmp_path) == ["step_000002", "step_000006"]


def test_an_evaluation_that_fails_with_the_training_ends_the_run(
    tmp_path: Path, stop: Stop, reward: RewardFunction
) -> None:
    def broken(engines: Engines) -> Sample:
        def sample(prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
            raise ZeroDivisionError("an engine")

        return sample

    loop = make(tmp_path, stop, reward, steps=STEPS, alongside=broken)
    with pytest.raises(ZeroDivisionError, match="an engine"):
        loop.run()
    assert loop.state.step == 1


def test_more_is_better_and_the_first_of_equal_ones() -> None:
    best = better(None, "eval", {"eval": 0.5}, 1)
    assert best == Best("eval", 0.5, 1)
    assert better(best, "eval", {"eval": 0.5}, 2) is best
    assert better(best, "eval", {"eval": float("nan")}, 2) is best
    assert better(best, "eval", {"eval": 0.6}, 3) == Best("eval", 0.6, 3)
    assert better(None, "", {"eval": 0.5}, 1) is None


def test_a_best_of_another_metric_or_without_a_checkpoint_is_reported_and_dropped() -> None:
    state = asdict(Best("eval", 0.5, 10))
    assert resumed(state, "eval", True) == (Best("eval", 0.5, 10), "")
    assert resumed(None, "eval", False) == (None, "")
    with pytest.raises(CheckpointError, match=r"run state has \['seed'\], .*; resume with the version that wrote it"):
        RunState.from_json({"seed": 1})
    assert resumed(state, "", True) == (None, "")
    gone, stated = resumed(state, "eval", False)
    assert gone is None
    assert "of step 10 (eval 0.5000), is not in this run directory any more" in stated
    other, stated = resumed(state, "eval/sums/mean", True)
    assert other is None
    assert "was eval before, and is eval/sums/mean now: step 10 is no longer kept" in stated


def test_pruning_leaves_what_is_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path)
    for step in range(1, 6):
        checkpoints.begin(step)
        checkpoints.commit(step, {})
    checkpoints.prune(2, (2, 5))
    assert kept(tmp_path) == ["step_000002", "step_000004", "step_000005"]

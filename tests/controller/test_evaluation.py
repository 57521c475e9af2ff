"""Evaluations end: by the deadline of the rewards, or by a stop that drops them. What engines answer is the test's."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steps import make_loop, make_step

from slurm_rlhf.algorithms.policy_distance import KLController
from slurm_rlhf.algorithms.reward_scale import RunningScale
from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.cluster.stop import STOP_FILE, Stop, StopRequested
from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.batch_sources import OnDemand
from slurm_rlhf.controller.batches import Batch, EpisodesOver
from slurm_rlhf.controller.loop import TrainingLoop
from slurm_rlhf.controller.reporting import Reporting
from slurm_rlhf.controller.self_check import PromptFindings, SelfCheck
from slurm_rlhf.controller.step import Step
from slurm_rlhf.controller.step_metrics import EngineMetrics
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.errors import FilteredAway, RewardError
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.model import Scoring
from slurm_rlhf.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(60)

IDS = np.array([3], dtype=np.int32)
PROMPTS = [Prompt(i, f"{i}=", IDS, label=str(i), row={}) for i in range(4)]
HANGS = """
import threading, time
hang, began = threading.Event(), threading.Event()
hang.set()

def reward_func(responses, labels, step):
    if step and hang.is_set():
        began.set()
        while hang.is_set():
            time.sleep(0.01)
    return [float(response == label) for response, label in zip(responses, labels)]
"""


class Engines:
    """Answers each prompt with its number; in place of `Dispatcher` and `EnginePool`."""

    def run(self, prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        floats, mask = np.zeros(1, np.float32), np.ones(1, np.bool_)
        return [
            Trajectory(prompt.index, sample, IDS, IDS, floats, mask, "stop", str(prompt.index), [])
            for prompt in prompts
            for sample in range(sampling.n)
        ]

    def update(self, version: int) -> dict[str, float]:
        return {}


class Role:
    """Ranks that have nothing to say."""

    def start_all(self, method: Any, argument: Any, /) -> list[Future[Any]]:
        done: Future[Any] = Future()
        done.set_result(None)
        return [done]

    def call_all(self, method: Any, argument: Any, /) -> list[Any]:
        return [None]


class Steps(Step):
    """Steps whose roles have nothing to compute."""

    def collect(self, batch: Batch, version: int) -> Any:
        return [], {"response_tokens": 8.0, "reward": float(batch.step), "kl": 0.0, "reward_clipped": 0.0}

    def update(self, number: int, experience: Any, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


def make(tmp_path: Path, stop: Stop, reward: RewardFunction, *, resume: bool = False) -> TrainingLoop:
    config = Config(run_dir=str(tmp_path))
    config.logger.progress, config.logger.tensorboard = "plain", False
    config.timeout.reward, config.eval.steps = 1.0, 1
    config.rollout.batch_size = config.rollout.n_samples_per_prompt = 1
    directory = RunDirectory(tmp_path)
    directory.make()
    engines, roles = Engines(), {"actor": Role(), "critic": Role()}
    config.train.self_check = False  # it has a test of its own, with roles that compute
    prompts, reporting = PromptSet(tmp_path, PROMPTS, 0), Reporting(config, directory, {"actor": 1})
    step = make_step(
        config,
        roles,
        Steps,
        pool=engines,
        dispatcher=engines,
        order=PromptOrder(4, 1, 1, 0),
        total_steps=2,
        reward=Scoring(reward, config.timeout.reward),
        kl=KLController(0.0),
        scale=RunningScale(3, 1.0, 2.0),
        self_check=SelfCheck(config, roles["actor"], reporting.note, PromptFindings({}), {}),  # type: ignore[arg-type]
        engine_metrics=EngineMetrics([], reporting.note),
        stop=stop,
    )
    order = PromptOrder(4, 1, 1, 0).state_dict()
    step.batches = OnDemand(lambda number: Batch(number, PROMPTS[:1], [], {}, 1.0, {**order}))
    return make_loop(step, directory, reporting, resume, prompts)


@pytest.fixture
def reward(tmp_path: Path) -> Iterator[RewardFunction]:
    file = tmp_path / "reward.py"
    file.write_text(HANGS)
    function = RewardFunction.load(str(file))
    yield function
    function._function.__globals__["hang"].clear()


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Stop]:
    with Stop(tmp_path) as listening:
        yield listening


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_reward_that_hangs_in_an_evaluation_ends_the_run_in_its_time(
    tmp_path: Path, stop: Stop, reward: RewardFunction
) -> None:
    run = make(tmp_path, stop, reward)
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"did not return within 1 s for 4 responses; .* raise timeout\.reward"):
        run.run()
    assert 1 <= time.monotonic() - began < 20
    assert run.state.eval_before == 1.0  # the function was still well then


@pytest.mark.parametrize("by", ["SIGTERM", "file"])
def test_a_stop_interrupts_it_and_the_run_that_goes_on_misses_nothing(
    tmp_path: Path, stop: Stop, reward: RewardFunction, by: str
) -> None:
    seen = reward._function.__globals__
    run = make(tmp_path, stop, reward)
    run.step.reward = Scoring(reward, 50.0)

    def ask() -> None:
        seen["began"].wait(30)
        if by == "file":
            (tmp_path / STOP_FILE).touch()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(StopRequested):
        run.run()
    assert run.state.step == 1
    assert rows(tmp_path) == []  # the step's line waits for its evaluation
    assert run.reporting.moved
    state = CheckpointDir(tmp_path).load_state(tmp_path / "checkpoints" / "step_000001")
    assert state["unevaluated"]["reward"] == 1.0
    assert state["reward_scale"] == {"count": 3, "mean": 1.0, "m2": 2.0}

    seen["hang"].clear()
    stop.reason = None
    again = make(tmp_path, stop, reward, resume=True)
    again.step.scale = RunningScale()
    again.checkpoints.load(tmp_path / "checkpoints" / "step_000001", again.reporting.note)
    assert again.step.scale == RunningScale(3, 1.0, 2.0)
    again.run()
    assert [(row["step"], row["reward"], row["eval"]) for row in rows(tmp_path)] == [(1, 1.0, 1.0), (2, 2.0, 1.0)]
    assert all("time/step" in row for row in rows(tmp_path))
    last = CheckpointDir(tmp_path).load_state(tmp_path / "checkpoints" / "step_000002")
    assert "unevaluated" not in last


def test_a_checkpoint_of_an_earlier_version_has_nothing_to_say_of_either(
    tmp_path: Path, stop: Stop, reward: RewardFunction
) -> None:
    reward._function.__globals__["hang"].clear()
    run = make(tmp_path, stop, reward)
    run.step.scale = None
    run.run()
    state = CheckpointDir(tmp_path).load_state(tmp_path / "checkpoints" / "step_000002")
    assert sorted(state) == ["kl", "order", "run"]
    again = make(tmp_path, stop, reward, resume=True)
    assert again.step.scale == RunningScale(3, 1.0, 2.0)


def test_a_function_s_own_time_out_is_told_as_its_own(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(responses):\n    raise TimeoutError('the judge')\n")
    with pytest.raises(RewardError, match=r"reward\.py:2: reward_func raised TimeoutError: the judge"):
        Scoring(RewardFunction.load(str(file)), 5.0)(PROMPTS, Engines().run(PROMPTS, Sampling(), 0), 1)


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_whose_prompts_are_used_up_ends_as_after_its_last_step(
    tmp_path: Path, stop: Stop, reward: RewardFunction, every: int
) -> None:
    reward._function.__globals__["hang"].clear()
    run = make(tmp_path, stop, reward)
    run.step.config.eval.steps = every
    sample = run.step.batches.take

    def take(number: int) -> Batch:
        if number == 2:
            raise EpisodesOver("the prompts of all episodes are used up")
        return sample(number)

    run.step.batches = OnDemand(take)
    run.run()
    assert run.state.step == 1
    assert run.state.eval_after == 1.0
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert CheckpointDir(tmp_path).latest() == tmp_path / "checkpoints" / "step_000001"


def test_a_run_of_which_nothing_passes_saves_what_it_has_learnt(
    tmp_path: Path, stop: Stop, reward: RewardFunction
) -> None:
    reward._function.__globals__["hang"].clear()
    run = make(tmp_path, stop, reward)
    sample = run.step.batches.take

    def take(number: int) -> Batch:
        if number == 2:
            raise FilteredAway("step 2: dynamic sampling kept 0 of 36 groups")
        return sample(number)

    run.step.batches = OnDemand(take)
    with pytest.raises(FilteredAway):
        run.run()
    assert CheckpointDir(tmp_path).latest() == tmp_path / "checkpoints" / "step_000001"

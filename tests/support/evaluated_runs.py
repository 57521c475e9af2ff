"""A run of the controller whose engines and roles are the test's: loop, checkpoints and evaluations are real."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from sampled_responses import response
from steps import OnDemand, make_loop, make_step

from slurm_rlhf.algorithms.losses import KLController
from slurm_rlhf.algorithms.reward_shaping import RunningScale
from slurm_rlhf.cluster.stop import Stop
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.eval.sets import Sample
from slurm_rlhf.records import Prompt, Sampling, Trajectory, pack
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.scored import Scoring
from slurm_rlhf.run.loop import TrainingLoop
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run.self_check import PromptFindings, SelfCheck
from slurm_rlhf.run.step import TrainingStep
from slurm_rlhf.run.step_metrics import EngineMetrics
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.batches import Batch

IDS = np.array([3], dtype=np.int32)
PROMPTS = [Prompt(i, f"{i}=", IDS, label=str(i), row={}) for i in range(4)]


class Engines:
    """Answers each prompt with its number; in place of `Episodes` and `EnginePool`."""

    version = 0

    def sample(self, prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        assert version == self.version  # the weights that they hold are those that are asked for
        return [response(prompt.index, str(prompt.index), sample) for prompt in prompts for sample in range(sampling.n)]

    def update(self, version: int) -> dict[str, float]:
        self.version = version
        return {}


class Role:
    """Ranks that have nothing to say."""

    def start_all(self, method: Any, argument: Any, /) -> list[Future[Any]]:
        done: Future[Any] = Future()
        done.set_result(None)
        return [done]

    def call_all(self, method: Any, argument: Any, /) -> list[Any]:
        return [None]


class Steps(TrainingStep):
    """Steps whose roles have nothing to compute."""

    def collect(self, batch: Batch, version: int) -> Any:
        metrics = {"response_tokens": 8.0, "reward": float(batch.step), "kl": 0.0, "reward_clipped": 0.0}
        return pack([], []), metrics

    def update(
        self, number: int, trajectories: Any, experience: Any, metrics: dict[str, float], version: int
    ) -> dict[str, float]:
        return metrics


def make(
    tmp_path: Path,
    stop: Stop,
    reward: RewardFunction,
    *,
    resume: bool = False,
    steps: int = 2,
    best_metric: str = "",
    alongside: Callable[[Engines], Sample] | None = None,
) -> TrainingLoop:
    """A run of `steps` steps, evaluated after each; `alongside` makes of its engines what samples while it trains."""
    config = Config(run_dir=str(tmp_path))
    config.ckpt.best_metric, config.ckpt.max_num, config.ckpt.save_steps = best_metric, 1, 2 if best_metric else 20
    config.logger.progress, config.logger.tensorboard = "plain", False
    config.timeout.reward, config.eval.steps = 1.0, 1
    config.rollout.batch_size = config.rollout.n_samples_per_prompt = 1
    directory = RunDirectory(tmp_path)
    directory.make()
    engines, roles = Engines(), {"actor": Role(), "critic": Role()}
    config.train.self_check = False  # it has a test of its own, with roles that compute
    prompts, reporting = PromptSet(PROMPTS, 0), Reporting(config, directory, {"actor": 1})
    step = make_step(
        config,
        roles,
        Steps,
        pool=engines,
        episodes=engines,
        order=PromptOrder(4, 1, steps, 0),
        total_steps=steps,
        reward=Scoring(reward, config.timeout.reward),
        kl=KLController(0.0),
        scale=RunningScale(3, 1.0, 2.0),
        self_check=SelfCheck(config, roles["actor"], reporting.note, PromptFindings({}), {}, None),  # type: ignore[arg-type]
        engine_metrics=EngineMetrics(str, reporting.note),
        stop=stop,
    )
    order = PromptOrder(4, 1, steps, 0).state_dict()
    step.batches = OnDemand(lambda number: Batch(number, PROMPTS[:1], [], {}, 1.0, {**order}))
    return make_loop(step, directory, reporting, resume, prompts, alongside(engines) if alongside else None)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

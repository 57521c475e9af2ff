"""The loop around the algorithm: steps, evaluations, checkpoints, metrics."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.algorithms.plugins import changed_plugins, load_plugins
from slurm_rlhf.algorithms.reward_scale import RunningScale, clip_warning
from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.cluster.stop import Stop, StopRequested
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import gather
from slurm_rlhf.controller.batches import Batches
from slurm_rlhf.controller.engine_metrics import EngineWatch
from slurm_rlhf.controller.engine_pool import Engines
from slurm_rlhf.controller.gpu_account import GpuAccount
from slurm_rlhf.controller.reporting import Reporting
from slurm_rlhf.controller.self_check import SelfCheck
from slurm_rlhf.controller.state import RunState
from slurm_rlhf.controller.step import PPO
from slurm_rlhf.controller.supervisor import Fleet
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.observe.metrics import finite
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.records import Experience, Sampling
from slurm_rlhf.run_directory import RunDirectory

REWARD_SCALE, UNEVALUATED, GPUS, PLUGINS = "reward_scale", "unevaluated", "gpus", "plugins"
"""In a checkpoint's state where there is something to say."""


@dataclass(slots=True)
class TrainingRun:
    """Everything is started; `run` goes from `state.step` to `total_steps`."""

    config: Config
    directory: RunDirectory
    fleet: Fleet
    eval_prompts: PromptSet | None
    order: PromptOrder
    ppo: PPO
    batches: Batches
    weights: Engines
    checkpoints: CheckpointDir
    state: RunState
    total_steps: int
    reporting: Reporting
    self_check: SelfCheck
    phases: Phases
    engines: EngineWatch
    stop: Stop
    clock: float  # time.monotonic() up to which `state.wall_s` has counted
    gpus: GpuAccount | None = None
    _saved_step: int = field(default=-1, init=False)
    _order: dict[str, Any] = field(default_factory=dict, init=False)  # behind the last batch that was trained on
    _unevaluated: dict[str, Any] | None = field(default=None, init=False)  # metrics of a step: see `_evaluate_step`
    _told_clipped: float = field(default=0.0, init=False)

    def run(self) -> None:
        """All steps that are left, then the final evaluation, checkpoint and export."""
        self._order = self.order.state_dict()
        self.weights.update(self.state.policy_version)
        for told in self.gpus.started() if self.gpus else ():
            self.reporting.note(told)
        if self.state.eval_before is None and self.eval_prompts:
            with self.stop.droppable():
                self.state.eval_before = self._evaluate()
            self.reporting.note(f"evaluation before training: {self.state.eval_before:.4f}")
        self.phases.take()  # what start-up took belongs to no step
        self.reporting.stepping()
        if self.gpus is not None:
            self.gpus.begin()
        try:
            self._evaluate_left_over()
            while self.state.step < self.total_steps:
                self._step()
                self._between_steps()
        except StopRequested:
            self._save_once()
            raise
        finally:
            self.batches.close()
        self._save_once()
        self._export()

    def _between_steps(self) -> None:
        if self.stop.save_wanted() or self._due(self.config.ckpt.save_steps, always_last=False):
            with self.phases("checkpoint"):
                self._save()
        if self.state.step < self.total_steps:
            self.stop.check()

    def _step(self) -> None:
        started, number = time.monotonic(), self.state.step + 1
        with self.stop.droppable():
            with self.phases("rollout"):
                batch = self.batches.take(number)
            experience, metrics = self.ppo.collect(batch, self.state.policy_version)
            self._warn(number, metrics)
            with self.phases("self_check"):
                self.self_check.before_update(
                    number, batch.trajectories, experience, metrics, self.state.policy_version
                )
        measured, notes = self.engines.step(number, batch.loads)
        for note in notes:
            self.reporting.note(note)
        metrics = self.ppo.update(number, experience, metrics | measured)
        self.self_check.after_update(number, metrics)
        version = self.state.policy_version + 1
        with self.phases("sync"):
            metrics |= self.weights.update(version)
        tokens = int(metrics["response_tokens"])
        self._count(number, version, tokens, metrics)
        self._order = batch.order

        def timed() -> dict[str, Any]:
            seconds = time.monotonic() - started
            speeds = {"tokens_per_s": tokens / seconds, "rollout_tokens_per_s": tokens / max(batch.seconds, 1e-9)}
            measured = {f"perf/{name}": speed for name, speed in speeds.items()}
            whole = metrics | self.phases.take() | measured | {"time/step": seconds}
            return whole | self._gpu_metrics(number, experience, whole)

        if self._due(self.config.eval.steps):
            try:
                self._evaluate_step(metrics)
            except StopRequested:
                self._unevaluated = timed()
                self.reporting.moved = True
                raise
        # Before the checkpoint: whatever a checkpoint has behind it has its line, and a later line is cut on resume.
        self.reporting.step(number, self.total_steps, timed())

    def _gpu_metrics(self, number: int, experience: Experience, metrics: dict[str, Any]) -> dict[str, float]:
        """None without GPUs."""
        if self.gpus is None:
            return {}
        measured, notes = self.gpus.step(number, experience, metrics)
        for note in notes:
            self.reporting.note(note)
        return measured

    def _evaluate_step(self, metrics: dict[str, Any]) -> None:
        """Evaluate behind a step, into its `metrics`. A stop drops the evaluation, and then the step has no line yet:
        the checkpoint keeps its metrics, and the run that goes on from there begins with the evaluation.
        """
        if self.eval_prompts:
            with self.stop.droppable(), self.phases("eval"), self.batches.alone():
                self.state.eval_after = metrics["eval"] = self._evaluate()

    def _evaluate_left_over(self) -> None:
        """The evaluation that a stop has dropped in the session before."""
        if self._unevaluated is not None:
            metrics = dict(self._unevaluated)
            self._evaluate_step(metrics)
            self._unevaluated, self._saved_step = None, -1
            self.reporting.step_again(self.state.step, self.total_steps, metrics)

    def _warn(self, number: int, metrics: dict[str, float]) -> None:
        share, allowed = metrics["reward_clipped"], self.config.reward.clip_range
        if warning := clip_warning(share, self._told_clipped, allowed):
            self._told_clipped = share
            self.reporting.note(f"step {number}: {warning}")

    def _count(self, number: int, version: int, tokens: int, metrics: dict[str, float]) -> None:
        state = self.state
        state.step, state.policy_version = number, version
        state.responses += self.config.rollout.batch_size * self.config.rollout.n_samples_per_prompt
        state.response_tokens += tokens
        state.reward_last = metrics["reward"]
        if state.reward_first is None:
            state.reward_first = metrics["reward"]
        metrics["policy_version"] = version

    def _due(self, every: int, always_last: bool = True) -> bool:
        last = always_last and self.state.step == self.total_steps
        return last or (every > 0 and self.state.step % every == 0)

    def _evaluate(self) -> float:
        """Mean score of the evaluation prompts; their mean reward, if the function gives no scores."""
        assert self.eval_prompts is not None
        settings = self.config.eval
        sampling = Sampling(
            n=settings.n_samples_per_prompt,
            temperature=settings.temperature,
            max_new_tokens=self.config.rollout.max_new_tokens,
            stop=list(self.config.rollout.stop),
        )
        prompts = list(self.eval_prompts)
        trajectories = self.ppo.generation.run(prompts, sampling, self.state.policy_version)
        owners = [prompt for prompt in prompts for _ in range(sampling.n)]
        rewards = self.ppo.reward(owners, trajectories, self.state.step)
        return float(np.mean(rewards.rewards if rewards.scores is None else rewards.scores, dtype=np.float64))

    def _count_wall(self) -> None:
        now = time.monotonic()
        self.state.wall_s += now - self.clock
        self.clock = now

    def _save_once(self) -> None:
        if self._saved_step != self.state.step:
            self._save()

    def _saving(self) -> list[str]:
        return [role for role in self.fleet.roles if ROLES[role].saves]

    def _save(self) -> None:
        step, started = self.state.step, time.monotonic()
        self._count_wall()
        path = self.checkpoints.begin(step)
        futures: list[Future[Any]] = []
        for role in self._saving():
            (path / role).mkdir()
            futures += self.fleet.roles[role].start_all("save", path=str(path / role))
        gather(futures)
        state: dict[str, Any] = {"run": self.state.to_json(), "order": self._order, "kl": self.ppo.kl.state_dict()}
        if self.ppo.scale is not None:
            state[REWARD_SCALE] = self.ppo.scale.state_dict()
        if self._unevaluated is not None:
            state[UNEVALUATED] = {name: finite(value) for name, value in self._unevaluated.items()}
        if self.gpus is not None:
            state[GPUS] = self.gpus.state_dict()
        if plugins := load_plugins(self.config.train.plugins):
            state[PLUGINS] = plugins
        self.checkpoints.commit(step, state)
        self.checkpoints.prune(self.config.ckpt.max_num)
        self._saved_step = step
        self.reporting.saved(step, time.monotonic() - started)

    def load(self, path: Path) -> None:
        """Take the roles, the data order and the KL coefficient back to a checkpoint; `state` is loaded already."""
        state = self.checkpoints.load_state(path)
        self.order.load_state_dict(state["order"])
        self.ppo.kl.load_state_dict(state["kl"])
        if isinstance(self.ppo.scale, RunningScale) and "count" in (before := state.get(REWARD_SCALE, {})):
            self.ppo.scale = RunningScale(**before)
        if changes := changed_plugins(state.get(PLUGINS, {}), load_plugins(self.config.train.plugins)):
            self.reporting.note(
                f"warning: train.plugins since {path.name} was written: {', '.join(changes)}. The run goes on with the "
                "files as they are now"
            )
        self._unevaluated = state.get(UNEVALUATED)
        if self.gpus is not None:
            self.gpus.load_state_dict(state.get(GPUS, {}))
        gather([f for role in self._saving() for f in self.fleet.roles[role].start_all("load", path=str(path / role))])
        self._saved_step = self.state.step

    def _export(self) -> None:
        gather(self.fleet.roles["actor"].start_all("export", path=str(self.directory.final)))
        self._count_wall()

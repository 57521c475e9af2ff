"""The loop around the steps of a run: evaluations, checkpoints, metrics, and the stop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.cluster.stop import StopRequested
from slurm_rlhf.config.roles import ACTOR
from slurm_rlhf.control.calls import ActorCalls, DirectoryRequest
from slurm_rlhf.controller.batches import EpisodesOver
from slurm_rlhf.controller.gpu_account import GpuAccount
from slurm_rlhf.controller.reporting import Reporting
from slurm_rlhf.controller.run_state import RunCheckpoints, RunState
from slurm_rlhf.controller.step import Metrics, Step
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.errors import FilteredAway
from slurm_rlhf.records import Experience, Sampling


@dataclass(slots=True)
class TrainingLoop:
    """Goes from `state.step` to the last step, once every role is started."""

    step: Step
    eval_prompts: PromptSet | None
    state: RunState
    checkpoints: RunCheckpoints
    reporting: Reporting
    final: Path  # where the trained model goes
    gpus: GpuAccount | None = None

    def run(self) -> None:
        """Do all steps that are left, then the final evaluation, checkpoint and export."""
        self.checkpoints.order = self.step.order.state_dict()
        self._begin()
        try:
            self._evaluate_left_over()
            while self.state.step < self.step.total_steps:
                self._do_step()
                self._between_steps()
        except EpisodesOver as over:
            self._end_early(over)
        except (StopRequested, FilteredAway):
            self.step.batches.close()
            self.checkpoints.save_once()
            raise
        finally:
            self.step.batches.close()
        self.checkpoints.save_once()
        self.step.roles[ACTOR].call_all(ActorCalls.export, DirectoryRequest(str(self.final)))
        self.checkpoints.count_wall()

    def _begin(self) -> None:
        """Give the engines their first weights; with vllm.sync_mode = inflight, evaluate before training."""
        self.step.sync(self.state.policy_version)
        for note in self.gpus.started() if self.gpus else ():
            self.reporting.note(note)
        if self.step.config.vllm.sync_mode == "inflight":
            # Later it would have to wait until the groups that are sampled ahead are finished, the longest included,
            # and the first update would find the engines empty.
            with self.step.stop.droppable():
                self._evaluate_before()
        self.step.phases.take()  # what start-up took belongs to no step
        self.reporting.stepping()
        if self.gpus is not None:
            self.gpus.begin()

    def _do_step(self) -> None:
        started, number, version = time.monotonic(), self.state.step + 1, self.state.policy_version
        batch, experience, metrics = self.step.run(number, version, self._evaluate_before)
        tokens = int(metrics["response_tokens"])
        self._count(number, version + 1, batch.judged or len(batch.prompts), tokens, metrics)
        self.checkpoints.order = batch.order

        def timed() -> dict[str, Any]:
            seconds = time.monotonic() - started
            speeds = {"tokens_per_s": tokens / seconds, "rollout_tokens_per_s": tokens / max(batch.seconds, 1e-9)}
            measured = {f"perf/{name}": speed for name, speed in speeds.items()}
            whole = metrics | self.step.phases.take() | measured | {"time/step": seconds}
            return whole | self._gpu_metrics(number, experience, whole)

        if self._due(self.step.config.eval.steps):
            try:
                self._evaluate_step(metrics)
            except StopRequested:
                self.checkpoints.unevaluated = timed()
                self.reporting.moved = True
                raise
        # Before the checkpoint: every step up to a checkpoint has its line, and a resume cuts off the later lines.
        self.reporting.step(number, self.step.total_steps, timed())

    def _between_steps(self) -> None:
        last = self.state.step == self.step.total_steps
        if self.step.stop.save_wanted() or (not last and self._due(self.step.config.ckpt.save_steps)):
            with self.step.phases("checkpoint"):
                self.checkpoints.save()
        if not last:
            self.step.stop.check()

    def _end_early(self, over: EpisodesOver) -> None:
        """Do what the last step of a run does after it: dynamic sampling has used up the prompts before."""
        self.reporting.note(str(over))
        every = self.step.config.eval.steps
        evaluated = self.state.step > 0 and every > 0 and self.state.step % every == 0
        try:
            if not evaluated:
                self._evaluate_step({})
        except StopRequested:
            self.checkpoints.save_once()
            raise

    def _due(self, every: int) -> bool:
        """Tell whether something is due after this step that is due every so many (0: never), and after the last."""
        return self.state.step == self.step.total_steps or (every > 0 and self.state.step % every == 0)

    def _count(self, number: int, version: int, sampled: int, tokens: int, metrics: Metrics) -> None:
        state = self.state
        state.step, state.policy_version = number, version
        state.responses += sampled * self.step.config.rollout.n_samples_per_prompt
        state.response_tokens += tokens
        state.reward_last = metrics["reward"]
        if state.reward_first is None:
            state.reward_first = metrics["reward"]
        metrics["policy_version"] = version

    def _gpu_metrics(self, number: int, experience: Experience, metrics: dict[str, Any]) -> Metrics:
        """Measure the GPUs' step; nothing where there are none."""
        if self.gpus is None:
            return {}
        measured, notes = self.gpus.step(number, experience, metrics)
        for note in notes:
            self.reporting.note(note)
        return measured

    def _evaluate_before(self) -> None:
        """Evaluate before the first update of the run, unless that is done.

        The self-check has seen the first batch by then, but for inflight: what is wrong with the engines is told as
        such, and not after the time of an evaluation.
        """
        if self.state.eval_before is None and self.eval_prompts:
            with self.step.phases("eval"), self.step.batches.alone():
                self.state.eval_before = self._evaluate(self.eval_prompts)
            self.reporting.note(f"evaluation before training, mean score of eval.dataset: {self.state.eval_before:.4f}")

    def _evaluate_step(self, metrics: dict[str, Any]) -> None:
        """Evaluate after a step, into its `metrics`.

        A stop drops the evaluation, and then the step has no line yet: the checkpoint keeps its metrics, and the run
        that goes on from there begins with the evaluation.
        """
        if self.eval_prompts:
            with self.step.stop.droppable(), self.step.phases("eval"), self.step.batches.alone():
                self.state.eval_after = metrics["eval"] = self._evaluate(self.eval_prompts)

    def _evaluate_left_over(self) -> None:
        """Do the evaluation that a stop has dropped in the session before."""
        if self.checkpoints.unevaluated is not None:
            metrics = dict(self.checkpoints.unevaluated)
            self._evaluate_step(metrics)
            self.checkpoints.evaluated()
            self.reporting.step_again(self.state.step, self.step.total_steps, metrics)

    def _evaluate(self, evaluated: PromptSet) -> float:
        """Average the scores of the evaluation prompts; their rewards, if the function gives no scores."""
        settings = self.step.config.eval
        sampling = Sampling(
            n=settings.n_samples_per_prompt,
            temperature=settings.temperature,
            max_new_tokens=self.step.config.rollout.max_new_tokens,
            stop=list(self.step.config.rollout.stop),
        )
        prompts = list(evaluated)
        trajectories = self.step.generate(prompts, sampling, self.state.policy_version)
        owners = [prompt for prompt in prompts for _ in range(sampling.n)]
        rewards = self.step.reward(owners, trajectories, self.state.step)
        return float(np.mean(rewards.rewards if rewards.scores is None else rewards.scores, dtype=np.float64))

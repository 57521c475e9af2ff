"""The loop around the steps of a run: evaluations, checkpoints, metrics, and the stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.stop import StopRequested
from slurm_rlhf.config.roles import ACTOR, REWARD
from slurm_rlhf.errors import FilteredAway, RemoteError, RewardError
from slurm_rlhf.eval.sets import Evaluated, Evaluation
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run.run_state import RunCheckpoints, RunState
from slurm_rlhf.run.step import Metrics, TrainingStep
from slurm_rlhf.sampling.batches import EpisodesOver
from slurm_rlhf.wire.calls import ActorCalls


@dataclass(slots=True)
class TrainingLoop:
    """Goes from `state.step` to the last step, once every role is started."""

    step: TrainingStep
    evaluation: Evaluation | None
    state: RunState
    checkpoints: RunCheckpoints
    reporting: Reporting
    final: Path  # directory for the trained model
    failed: Exception | None = field(default=None, init=False)  # error of the evaluation during this step

    def run(self) -> None:
        """Do the steps that are left, then the final evaluation, checkpoint and export."""
        self.checkpoints.order = self.step.order.state_dict()
        self._begin()
        try:
            if not self._overlaps():
                self._evaluate_left_over()
            self._do_steps()
        except BaseException as error:
            if not isinstance(error, StopRequested | FilteredAway) and not _of_reward(error):
                self.checkpoints.abandon(self.step.config.timeout.hang_grace)
                raise
            self.step.batches.close()
            self.checkpoints.save_once()
            if self.state.step and _of_reward(error):
                self.reporting.note(f"the steps up to {self.state.step} are saved: the same command goes on from there")
            raise
        finally:
            self.step.batches.close()
        with self.step.phases("checkpoint"):
            self.checkpoints.save_once()
        with self.step.phases("export"):
            self.step.roles[ACTOR].call_all(ActorCalls.export, str(self.final))
        self.checkpoints.count_wall()

    def _begin(self) -> None:
        """Give the engines their first weights; if they are inflight or colocated, evaluate before training."""
        self.step.sync(self.state.policy_version)
        if self.reporting.gpus is not None:
            self.reporting.gpus.started()
        self.reporting.best = self.checkpoints.best
        if self.step.config.vllm.sync_mode == "inflight" or self.step.colocation is not None:
            # Later, inflight, the evaluation would wait for all groups that are sampled ahead, and the engines would be
            # idle at the first update. Colocated, it would need a turn of the engines within a step.
            with self.step.stop.droppable():
                self._evaluate_before()
        self.step.phases.take()  # the time of start-up belongs to no step
        self.reporting.stepping()
        self.checkpoints.cadence.begin()

    def _do_steps(self) -> None:
        try:
            while self.state.step < self.step.total_steps:
                self._do_step()
                if self.failed is not None:
                    raise self.failed
                self._between_steps()
        except EpisodesOver as over:
            self._end_early(over)

    def _do_step(self) -> None:
        started, number, version = time.monotonic(), self.state.step + 1, self.state.policy_version
        overlap = self._begin_overlap if self.checkpoints.unevaluated is not None else None
        batch, experience, metrics = self.step.run(number, version, self._evaluate_before, overlap)
        tokens = int(metrics["response_tokens"])
        self._count(number, version + 1, batch.judged or len(batch.prompts), tokens, metrics)
        self.reporting.samples(batch, experience)
        self.checkpoints.order = batch.order

        def timed() -> dict[str, Any]:
            seconds = time.monotonic() - started
            speeds = {"tokens_per_s": tokens / seconds, "rollout_tokens_per_s": tokens / max(batch.seconds, 1e-9)}
            measured = {f"perf/{name}": speed for name, speed in speeds.items()}
            whole = metrics | self.step.phases.take() | measured | {"time/step": seconds}
            gpus = self.reporting.gpus
            if self.reporting.prediction is not None:
                self.reporting.prediction.step(experience, whole)
            spans = self.reporting.recorder.take()
            return whole | (gpus.step(number, experience, spans, whole) if gpus is not None else {})

        if self.evaluation and self._due(self.step.config.eval.steps):
            if self._overlaps():
                self.checkpoints.unevaluated = line = timed()
                self.reporting.step(number, self.step.total_steps, line)
                return
            try:
                self._evaluate_step(metrics)
            except (StopRequested, RewardError, RemoteError):
                self.checkpoints.unevaluated = timed()
                self.reporting.moved = True
                raise
        # Before the checkpoint: every step up to a checkpoint has its line, and a resume cuts off the later lines.
        self.reporting.step(number, self.step.total_steps, timed())

    def _between_steps(self) -> None:
        last = self.state.step == self.step.total_steps
        self.checkpoints.poll()
        due = self.checkpoints.cadence.due(self.state.step) or self.checkpoints.candidate
        if self.step.stop.save_wanted() or (not last and due):
            with self.step.phases("checkpoint"):
                self.checkpoints.save(async_save=self.step.config.ckpt.async_save and not last)
        if not last:
            self.step.stop.check()
        self.checkpoints.cadence.begin()

    def _end_early(self, over: EpisodesOver) -> None:
        """Evaluate as after the last step, if that is not done: dynamic sampling has used up the prompts early."""
        self.reporting.note(str(over))
        evaluated = self.state.step > 0 and self._due(self.step.config.eval.steps)
        if self.checkpoints.unevaluated is not None:
            self._evaluate_left_over()
        elif not evaluated:
            self._evaluate_step({})

    def _due(self, every: int) -> bool:
        """Tell whether this step is the last one, or a multiple of `every` (0: never)."""
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

    def _evaluate_before(self) -> None:
        """Evaluate before the first update of the run, unless that is done.

        The self-check has seen the first batch by then, unless the run is inflight or colocated: it reports faulty
        engines before they spend the time of an evaluation.
        """
        if self.state.eval_before is None and self.evaluation:
            with self.step.phases("eval"), self.step.batches.alone():
                found = self.evaluation.run(self.state.step, self.state.policy_version)
            self.state.eval_before = found.mean
            self.reporting.note(f"evaluation before training, mean score: {found}")

    def _evaluate_step(self, metrics: dict[str, Any]) -> None:
        """Evaluate after a step, into its `metrics`.

        A stop or an error drops the evaluation, and then the step has no line yet: the checkpoint keeps its metrics,
        and the run that goes on from there begins with the evaluation.
        """
        if self.evaluation:
            with self.step.stop.droppable(), self.step.phases("eval"), self.step.batches.alone():
                found = self.evaluation.run(self.state.step, self.state.policy_version)
            self._evaluated(found, metrics)

    def _evaluated(self, found: Evaluated, metrics: dict[str, Any]) -> None:
        """Put what an evaluation has found into the step's `metrics`, and see whether it is the best."""
        self.state.eval_after = found.mean
        metrics |= found.metrics
        self.checkpoints.judge(found.metrics)
        self.reporting.best = self.checkpoints.best

    def _overlaps(self) -> bool:
        """Tell whether the evaluation of the last step goes on during the next step's training."""
        return (
            self.evaluation is not None
            and self.evaluation.overlapping is not None
            and self.state.step < self.step.total_steps
        )

    def _begin_overlap(self) -> Callable[[], None]:
        """Begin the evaluation of the step before, and return the function that takes its results."""
        assert self.evaluation is not None
        self.evaluation.begin(self.state.policy_version)
        return self._finish_overlap

    def _finish_overlap(self) -> None:
        """Take the results of the evaluation of the step before, whose line is there already.

        Where the reward fails, the present step is finished and saved all the same, without the evaluation.
        """
        assert self.evaluation is not None
        assert self.checkpoints.unevaluated is not None
        metrics = dict(self.checkpoints.unevaluated)
        try:
            with self.step.phases("eval"):
                found = self.evaluation.finish(self.state.step)
        except (RewardError, RemoteError) as error:
            if not _of_reward(error):
                raise
            self.failed = error
            self.checkpoints.evaluated()
            return
        self._evaluated(found, metrics)
        self.checkpoints.evaluated()
        self.reporting.evaluated(self.state.step, metrics, found.metrics, str(found))

    def _evaluate_left_over(self) -> None:
        """Do the evaluation that a stop has dropped in the session before, or that has no next step to overlap."""
        if self.checkpoints.unevaluated is not None:
            metrics = dict(self.checkpoints.unevaluated)
            self._evaluate_step(metrics)
            self.checkpoints.evaluated()
            self.reporting.step_again(self.state.step, self.step.total_steps, metrics)
            if self.checkpoints.candidate:
                self.checkpoints.save()


def _of_reward(error: BaseException) -> bool:
    """Tell whether a reward function or a rank of the reward model raised: then trainers and weights are intact."""
    return isinstance(error, RewardError) or (isinstance(error, RemoteError) and error.role == REWARD)

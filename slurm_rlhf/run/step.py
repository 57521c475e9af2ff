"""One training step: prompts, rollout, rewards, log-probs and values, advantages, update, sync.

`TrainingStep.run` has them in this order for every kind of run. Roles compute the tensors; this module has the order.

- drain: engines finish a batch before they get new weights.
- inflight (vllm.sync_mode): a stream of groups is sampled while the actor trains (`group_stream`), batches are made of
  those that are finished, and the sync changes the weights under the responses in flight.
- actor (rollout.engine = hf): the actor's ranks sample themselves, between their updates. Nothing is transferred.
- colocated (train.colocate_all): engines sleep while the trainers compute, and lose their weights by it. So the sync of
  an update is the first part of the next generation, and not the last of the step: between the two, a checkpoint or an
  evaluation's reward model may need the accelerators, and engines that had the weights by then would lose them again.

`TrainingStep._transfer` is the one place that gives engines the weights of an update. Sources: Schulman et al.,
Proximal Policy Optimization (2017); Ouyang et al., Training language models to follow instructions (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from slurm_rlhf.algorithms.batching import Shard, assemble
from slurm_rlhf.algorithms.correction import mask_not_finite
from slurm_rlhf.algorithms.losses import KLController, ages, staleness
from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.algorithms.reward_shaping import RewardScale
from slurm_rlhf.cluster.stop import Stop
from slurm_rlhf.config.roles import REWARD
from slurm_rlhf.config.rules import before_update, of_the_update
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.errors import FilteredAway
from slurm_rlhf.groups.engine_pool import EnginePool
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.records import Experience, Prompt, Sampling, Trajectory, pack
from slurm_rlhf.rewards.scored import Rewards, Scoring
from slurm_rlhf.run.colocation import Colocation
from slurm_rlhf.run.experience import (
    fill_advantages,
    fill_correction,
    fill_passes,
    loss_mask,
    one_at_a_time,
    without_skipped,
)
from slurm_rlhf.run.self_check import SelfCheck
from slurm_rlhf.run.step_metrics import EngineMetrics, agreement_metrics, sample_metrics
from slurm_rlhf.run.update import Trained, first_pass, train, update_metrics
from slurm_rlhf.sampling.batches import Batch, EpisodesOver
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.group_stream import GroupStream
from slurm_rlhf.wire.handles import RoleHandle

Metrics = dict[str, float]

Overlap = Callable[[], Callable[[], None]]
"""Begins to use the engines, and returns at once a function that waits until they are idle again."""


@dataclass(slots=True)
class TrainingStep:
    """Does the steps of a run, one after the other."""

    config: Config
    algorithm: Algorithm
    roles: Mapping[str, RoleHandle[Any]]
    pool: EnginePool | None  # None: the actor samples
    episodes: Episodes
    colocation: Colocation | None  # None: every role has accelerators of its own
    prompts: PromptSet
    order: PromptOrder
    total_steps: int
    reward: Scoring
    kl: KLController
    scale: RewardScale | None  # reward.normalize_enable
    self_check: SelfCheck
    engine_metrics: EngineMetrics
    phases: Phases
    stop: Stop
    batches: GroupStream = field(init=False)
    _synced: Metrics = field(default_factory=dict, init=False)  # metrics of the last sync

    def __post_init__(self) -> None:
        last, awake = self.total_steps, self.awake
        self.batches = GroupStream(self.config, self.prompts, self.order, last, self.episodes, self.reward, awake)

    def run(
        self, number: int, version: int, checked: Callable[[], None], overlap: Overlap | None = None
    ) -> tuple[Batch, Experience, Metrics]:
        """Do step `number`: train the actor's policy `version`, which becomes `version + 1`.

        `overlap` uses the engines after the last response, with policy `version`. `checked` is called when the batch
        has passed the self-check. A stop drops everything before the update, and raises StopRequested; from there on
        the step is finished.
        """
        finish: Callable[[], None] | None = None
        with self.stop.droppable():
            with self.phases("rollout"):
                batch = self.batches.take(number)
            if overlap is not None:
                finish = overlap()
            experience, metrics = self.collect(batch, version)
            with self.phases("self_check"):
                self.self_check.before_update(number, batch.trajectories, experience, metrics, version)
            checked()
        metrics |= self.engine_metrics.step(number, batch.loads)
        metrics = self.update(number, batch.trajectories, experience, metrics, version)
        self.self_check.after_update(number, experience, metrics)
        if finish is not None:
            finish()
        self.sync(version + 1)
        return batch, experience, metrics | batch.metrics | self._synced

    def generate(self, prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        """Sample `sampling.n` responses to each prompt, to evaluate the actor's policy `version`."""
        with self.awake(version):
            return self.episodes.sample(prompts, sampling, version)

    @contextmanager
    def awake(self, version: int) -> Iterator[None]:
        """Let the engines sample with policy `version`; colocated ones are awake meanwhile."""
        if self.colocation is None:
            yield
            return
        ended: Exception | None = None
        with self.colocation.turn() as spent:
            self._transfer(version)
            try:
                yield
            except (EpisodesOver, FilteredAway) as error:
                ended = error  # the run still saves and exports: the trainers get the accelerators back first
        self._synced |= spent
        if ended is not None:
            raise ended

    def sync(self, version: int) -> None:
        """Give the engines the actor's weights, as policy `version`; engines that sleep get them when they wake up."""
        if self.colocation is None:
            self._transfer(version)
        self.batches.updated(version)

    def _transfer(self, version: int) -> None:
        """Update the engines' weights, if there are engines; wake them up around it where they sleep."""
        if self.pool is None:
            return
        with self.phases("sync"), self.colocation.waking(version) if self.colocation else nullcontext():
            self._synced = self.pool.update(version)

    def collect(self, batch: Batch, version: int) -> tuple[Experience, Metrics]:
        """Compute the inputs of an update, with the actor at policy `version`; repeating it does no harm.

        The ratio of the update is taken to the actor's own log-probs at `version`, whichever policies sampled the
        tokens: what is clipped is the distance from the newest policy. The distance of that to the policy which sampled
        a token is corrected by a weight, which `algo.correction` chooses (`algorithms.correction`); its `bypass` takes
        the ratio to the policy that sampled instead. If nothing needs the actor's log-probs before the update, they
        come from its own pass (`rules.of_the_update`), and are compared with the engines' afterwards.
        """
        experience = pack(batch.trajectories, [0.0] * len(batch.trajectories))
        lost = mask_not_finite(experience)
        rewards = batch.scored = without_skipped(self.config, experience, self._score(batch, experience))
        experience.rewards = rewards.rewards
        with self.phases("advantages"):
            metrics = fill_advantages(self.config, self.algorithm, experience, rewards, self.kl.coef, self.scale)
            if self.config.vllm.sync_mode == "inflight":
                metrics |= staleness(batch.trajectories, ages(batch.trajectories, version), experience.action_mask)
            if before_update(self.config):
                metrics |= self._compare(batch.trajectories, experience, version)
            metrics["correction/not_finite"] = float(lost)
        return experience, metrics | sample_metrics(self.config, batch.trajectories, rewards, experience)

    def _compare(self, trajectories: list[Trajectory], experience: Experience, version: int) -> Metrics:
        """Compare the policies that sampled with the actor's policy `version`, and fill the weights of a correction."""
        metrics = fill_correction(self.config, experience, ages(trajectories, version))
        return metrics | agreement_metrics(self.config, trajectories, experience, version)

    def _compare_pass(
        self, trajectories: list[Trajectory], experience: Experience, steps: list[Trained], version: int
    ) -> Metrics:
        """Compare by the pass of the first optimizer step, in which the actor still had policy `version`.

        With bypass and several optimizer steps that pass has a random part of the batch. If the old log-probs come from
        the update, it has the whole batch, and fills their column.
        """
        first = first_pass(steps)
        if first is None:  # the actor is frozen, or all was skipped
            return {}
        rows, logprobs = first
        if of_the_update(self.config):
            experience.columns["logprobs"] = assemble(experience, [Shard(rows, experience, [])], [logprobs])
            return self._compare(trajectories, experience, version)
        part = experience.select(rows)
        part.columns["logprobs"] = logprobs
        return self._compare([trajectories[row] for row in rows], part, version)

    def _score(self, batch: Batch, experience: Experience) -> Rewards:
        """Get the rewards of the user's function or of a model, while other roles compute log-probs and values."""
        owners = [prompt for prompt in batch.prompts for _ in range(self.config.rollout.n_samples_per_prompt)]
        with self.phases("forward"):
            # Dynamic sampling has asked for them already.
            asked = batch.asked
            if not (asked or batch.rewards):
                asked = [self.reward.begin(owners, batch.trajectories, batch.step)]
            if REWARD in self.roles:
                with self.phases("reward"):
                    one_at_a_time(self.config, asked)
            fill_passes(self.config, self.roles, experience)
        with self.phases("reward"):
            return batch.rewards or self.reward.wait(asked, len(batch.trajectories), batch.step)

    def update(
        self, number: int, trajectories: list[Trajectory], experience: Experience, metrics: Metrics, version: int
    ) -> Metrics:
        """Train actor and critic on the experience of `collect`; add the metrics of the training."""
        with self.phases("update"):
            in_loss = replace(experience, action_mask=loss_mask(self.config, experience))
            steps = train(self.config, self.algorithm, self.roles, in_loss, number, self.kl.coef)
            trained = update_metrics(steps)
        if not before_update(self.config):
            trained |= self._compare_pass(trajectories, experience, steps, version)
        if "kl" in metrics:
            self.kl.update(metrics["kl"], len(experience))
        if self.scale is not None:
            self.scale = self.scale.with_batch(experience.rewards)
        return metrics | trained

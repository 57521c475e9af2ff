"""Defines batches and the groups that they are made of, and makes a batch of finished groups.

A group is a prompt with its n responses; `group_stream` decides which begin, and which make a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slurm_rlhf.algorithms.reward_shaping import passes
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import FilteredAway
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.scored import Rewards, joined
from slurm_rlhf.sampling.group_rules import GroupState

if TYPE_CHECKING:
    from slurm_rlhf.sampling.scheduler import EngineWork


class EpisodesOver(Exception):
    """Says that the prompts of all episodes are used up before a batch was full; the run ends, as planned."""

    def __init__(self, step: int, kept: int, batch: int) -> None:
        super().__init__(
            f"the prompts of all episodes are used up: {kept} of the groups for step {step} are there, which needs "
            f"rollout.batch_size = {batch}, so the run ends after step {step - 1}; raise train.num_episodes to go on"
        )


@dataclass(slots=True)
class Batch:
    """Holds what one step trains on."""

    step: int
    prompts: list[Prompt]
    trajectories: list[Trajectory]  # `Sampling.n` for each prompt, in (prompt, sample) order
    loads: dict[int, EngineLoad]  # engine -> its work since the batch before
    seconds: float  # time from the first request to the last response
    order: dict[str, Any]  # state of the prompt order once a step has trained on this batch
    rewards: Rewards | None = None  # rewards by dynamic sampling; None: not known yet
    asked: list[Future[Rewards]] = field(default_factory=list)  # rewards that come, of each group; empty: not asked for
    scored: Rewards | None = None  # rewards of the step, once they are there
    metrics: dict[str, float] = field(default_factory=dict)
    judged: int = 0  # groups that dynamic sampling looked at since the batch before; 0: it is off


@dataclass(slots=True, eq=False)
class PromptGroup:
    """Holds a prompt and the responses that have come."""

    place: int  # place in the prompt order
    prompt: Prompt
    state: GroupState
    sampling: Sampling
    round: int  # seeds its responses
    work: EngineWork | None = None  # work of the engine that samples it
    position: int = 0  # place in its wave
    begun: float = 0.0
    ended: float = 0.0  # time of its last response
    trajectories: list[Trajectory] = field(default_factory=list)
    rewards: Rewards | None = None
    scoring: Future[Rewards] | None = None  # rewards that come while others are sampled
    verdict: bool | None = None  # True: it may be trained on; None: not known yet

    def ordered(self) -> list[Trajectory]:
        """Return the responses in the order of their samples."""
        return sorted(self.trajectories, key=lambda trajectory: trajectory.sample)


def responses_of(groups: Iterable[PromptGroup]) -> list[Trajectory]:
    """Return all responses, in (group, sample) order."""
    return [trajectory for group in groups for trajectory in group.ordered()]


def owners_of(groups: Iterable[PromptGroup]) -> list[Prompt]:
    """Return the prompt of each of `responses_of`."""
    return [group.prompt for group in groups for _ in group.trajectories]


@dataclass(slots=True)
class FilterCounts:
    """Counts the groups that dynamic sampling has judged since the last batch."""

    bounds: list[float]  # algo.dynamic_filtering_range
    judged: int = 0
    passed: int = 0

    def judge(self, groups: Sequence[PromptGroup], rewards: Rewards, samples: int) -> None:
        """Give each group its rewards, `samples` each, and its verdict."""
        for index, group in enumerate(groups):
            group.rewards = rewards.select(slice(index * samples, (index + 1) * samples))
            values = group.rewards.rewards if group.rewards.scores is None else group.rewards.scores
            group.verdict = passes(values, self.bounds)
            self.judged += 1
            self.passed += group.verdict

    def take(self) -> tuple[int, dict[str, float]]:
        """Return the count of judged groups and the metrics, and begin anew."""
        judged, passed, self.judged, self.passed = self.judged, self.passed, 0, 0
        rate = {"dynamic_filtering/pass_rate": passed / judged} if judged else {}
        return judged, {"dynamic_filtering/prompts": float(judged), **rate}

    def filtered_away(self, step: int, kept: int, batch: int, tries: int) -> FilteredAway:
        """Make the error of a batch that did not become full within its tries."""
        wanted = f"strictly between {self.bounds[0]:g} and {self.bounds[1]:g}" if self.bounds else "not all equal"
        return FilteredAway(
            f"step {step}: dynamic sampling kept {self.passed} of {self.judged} groups "
            f"({self.passed / max(1, self.judged):.1%}) and {kept} are there for the batch, which needs "
            f"rollout.batch_size = {batch}, within algo.dynamic_filtering_max_tries = {tries}. A group is kept "
            f"if the scores of its responses are {wanted}: bring prompts that the policy solves sometimes, raise "
            "rollout.n_samples_per_prompt or algo.dynamic_filtering_max_tries, or widen algo.dynamic_filtering_range"
        )


def sampling_of(config: Config) -> Sampling:
    """Say how responses are sampled to train on."""
    r = config.rollout
    return Sampling(
        n=r.n_samples_per_prompt,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        max_new_tokens=r.max_new_tokens,
        stop=list(r.stop),
        max_pattern_size=r.repetition_detection_max_pattern_size,
        min_pattern_size=r.repetition_detection_min_pattern_size,
        min_count=r.repetition_detection_min_count,
    )


def assemble_batch(
    step: int,
    groups: Sequence[PromptGroup],
    loads: dict[int, EngineLoad],
    order: dict[str, Any],
    counts: FilterCounts | None,
) -> Batch:
    """Make the batch of `step` from its groups."""
    rewards = [group.rewards for group in groups if group.rewards is not None]
    judged, metrics = counts.take() if counts is not None else (0, {})
    return Batch(
        step=step,
        prompts=[group.prompt for group in groups],
        trajectories=responses_of(groups),
        loads=loads,
        seconds=float(np.max([g.ended for g in groups]) - np.min([g.begun for g in groups])),
        order=order,
        rewards=joined(rewards) if rewards else None,
        asked=[group.scoring for group in groups if group.scoring is not None],
        metrics=metrics,
        judged=judged,
    )

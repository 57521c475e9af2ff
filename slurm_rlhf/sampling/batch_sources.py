"""Makes the batches of a run: one when its step asks, by rounds with a filter, or from a stream of groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

from slurm_rlhf.algorithms.reward_shaping import refill
from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.records import EngineLoad
from slurm_rlhf.rewards.model import Scoring
from slurm_rlhf.sampling.batches import (
    Batch,
    Batches,
    FilterCounts,
    PromptGroup,
    assemble_batch,
    episodes_over,
    prompts_at_once,
    sampling_of,
)
from slurm_rlhf.sampling.dispatch import Dispatcher, Sampler
from slurm_rlhf.sampling.engine_feed import EngineFeed
from slurm_rlhf.sampling.group_rules import GroupState, first_passing
from slurm_rlhf.sampling.group_stream import GroupStream, Rule

Awake = Callable[[int], AbstractContextManager[None]]
"""Lets engines sample with a policy version: colocated ones are awake meanwhile."""


class OnDemand:
    """Implements `Batches`: samples each batch when its step asks, with the weights that the step trains."""

    def __init__(self, sample: Callable[[int], Batch]) -> None:
        self._sample = sample

    def take(self, step: int) -> Batch:
        return self._sample(step)

    def updated(self, version: int) -> None:
        pass

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Awakened:
    """Implements `Batches`: a stream of fresh groups, with engines that may sleep between two batches."""

    stream: GroupStream
    awake: Awake

    def take(self, step: int) -> Batch:
        with self.awake(step - 1):
            return self.stream.take(step)

    def updated(self, version: int) -> None:
        self.stream.updated(version)

    def alone(self) -> AbstractContextManager[None]:
        return self.stream.alone()

    def close(self) -> None:
        self.stream.close()


@dataclass(slots=True)
class Rounds:
    """Samples filtered batches in rounds, for `OnDemand`: train.full_determinism, and rollout.engine = hf.

    The size of a round, and which engine gets which prompt, depend on the groups that passed before and never on time,
    so the metrics are equal bit for bit. The price: engines wait for the last response of a round.
    """

    config: Config
    rule: Rule
    prompts: PromptSet
    order: PromptOrder
    dispatcher: Sampler
    reward: Scoring
    awake: Awake

    def sample(self, step: int) -> Batch:
        """Sample until `rollout.batch_size` groups pass; the first of them in the order of the prompts are the batch.

        Further groups that passed would be stale in the next step: their prompts come first there.
        """
        rule, batch = self.rule, self.rule.batch
        counts, groups = FilterCounts(self.config.algo.dynamic_filtering_range), list[PromptGroup]()
        loads: dict[int, EngineLoad] = {}
        with self.awake(step - 1):
            while (chosen := first_passing([group.verdict for group in groups], batch)) is None:
                if counts.judged >= rule.most:
                    raise counts.filtered_away(step, counts.passed, batch, rule.tries)
                count = rule.at_once
                if groups:
                    count = refill(batch - counts.passed, counts.passed, counts.judged, rule.at_once)
                found = self._round(step, min(count, rule.most - counts.judged), counts, loads)
                if not found:
                    raise episodes_over(step, counts.passed, batch)
                groups += found
        self.order.give_back([group.place for group in groups[chosen[-1] + 1 :]])
        return assemble_batch(step, [groups[index] for index in chosen], loads, self.order.state_dict(), counts)

    def _round(self, step: int, count: int, counts: FilterCounts, loads: dict[int, EngineLoad]) -> list[PromptGroup]:
        """Sample and judge the groups of the next `count` places; fewer at an episode's end: no prompt comes twice."""
        places = self.order.take(count)
        behind = [place for place in places if self.order.episode_of(place) != self.order.episode_of(places[0])]
        if behind:
            self.order.give_back(behind)
            places = places[: -len(behind)]
        if not places:
            return []
        how = sampling_of(self.config)
        prompts = [self.prompts[self.order.position(place)] for place in places]
        groups = [PromptGroup(*each, GroupState(step - 1)) for each in zip(places, prompts, strict=True)]
        # The batch that the first place is in seeds them: a prompt that comes again has other responses.
        batch = places[0] // self.order.batch_size
        responses = self.dispatcher.run([group.prompt for group in groups], how, step - 1, batch)
        for index, group in enumerate(groups):
            group.trajectories = responses[index * how.n : (index + 1) * how.n]
            group.ended = time.monotonic()
        for engine, load in self.dispatcher.loads.items():
            loads.setdefault(engine, EngineLoad()).add(load)
        owners = [group.prompt for group in groups for _ in range(how.n)]
        counts.judge(groups, self.reward(owners, responses, step), how.n)
        return groups


@dataclass(frozen=True, slots=True)
class Parts:
    """Holds the parts that make batches."""

    config: Config
    prompts: PromptSet
    order: PromptOrder
    last: int  # last step of the run
    dispatcher: Sampler
    reward: Scoring
    awake: Awake


def rule_of(config: Config, last: int) -> Rule:
    """Return the limits on groups in a run of `last` steps."""
    batch, train = config.rollout.batch_size, config.train
    return Rule(
        batch=batch,
        last=last,
        size=train.async_queue_size if config.vllm.sync_mode == "inflight" else None,
        at_once=prompts_at_once(config),
        tries=config.algo.dynamic_filtering_max_tries,
        ahead=int(train.staleness_threshold * batch),
    )


def make_batches(parts: Parts, sample: Callable[[int], Batch]) -> Batches:
    """Choose the source by vllm.sync_mode, dynamic filtering and full_determinism; `sample` is the plain one."""
    config, ahead = parts.config, parts.config.vllm.sync_mode == "inflight"
    filtered = config.algo.dynamic_filtering_enable
    if not ahead and not filtered:
        return OnDemand(sample)
    dispatcher, rule = parts.dispatcher, rule_of(config, parts.last)
    if not has_engines(config) or (not ahead and config.train.full_determinism):
        rounds = Rounds(config, rule, parts.prompts, parts.order, dispatcher, parts.reward, parts.awake)
        return OnDemand(rounds.sample)
    engines = cast(Dispatcher, dispatcher)
    stream = GroupStream(
        rule,
        parts.prompts,
        parts.order,
        sampling_of(config),
        EngineFeed(engines.rollout, engines.run_seed, engines.max_num_seqs, engines.answered),
        parts.reward if filtered else None,
        FilterCounts(config.algo.dynamic_filtering_range) if filtered else None,
        None if ahead or engines.pool is None else engines.pool.admit,
        engines.rescue,
    )
    return stream if ahead else Awakened(stream, parts.awake)

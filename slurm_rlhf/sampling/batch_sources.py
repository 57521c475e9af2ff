"""Makes the batches of a run: one when its step asks, in rounds where there is a filter, or of a stream of groups."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.algorithms.reward_shaping import refill
from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import EngineLoad
from slurm_rlhf.sampling.batches import (
    Batch,
    Batches,
    FilterCounts,
    Parts,
    PromptGroup,
    assemble_batch,
    episodes_over,
    owners_of,
    prompts_at_once,
    responses_of,
)
from slurm_rlhf.sampling.group_rules import first_passing
from slurm_rlhf.sampling.group_stream import GroupStream, Rule


@dataclass(slots=True)
class Rounds(Batches):
    """Samples each batch when its step asks, with the weights that the step trains.

    With dynamic sampling it does so in rounds: train.full_determinism, and rollout.engine = hf. The size of a round,
    and which engine gets which prompt, depend on the groups that passed before and never on time, so the metrics are
    equal bit for bit. The price: engines wait for the last response of a round.
    """

    rule: Rule
    filtered: bool

    def take(self, step: int) -> Batch:
        with self.parts.awake(step - 1):
            return self._filtered(step) if self.filtered else self._whole(step)

    def _whole(self, step: int) -> Batch:
        """Sample the next places of the order; the step seeds them, whenever that is."""
        groups = self._groups(self.parts.order.take(self.rule.batch), step, step - 1)
        loads = self.parts.episodes.finish(groups)
        return assemble_batch(step, groups, loads, self.parts.order.state_dict(), None)

    def _filtered(self, step: int) -> Batch:
        """Sample until `rollout.batch_size` groups pass; the first of them in the order of the prompts are the batch.

        Further groups that passed would be stale in the next step: their prompts come first there.
        """
        rule, batch, order = self.rule, self.rule.batch, self.parts.order
        counts, groups = FilterCounts(self.parts.config.algo.dynamic_filtering_range), list[PromptGroup]()
        loads: dict[int, EngineLoad] = {}
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
        order.give_back([group.place for group in groups[chosen[-1] + 1 :]])
        return assemble_batch(step, [groups[index] for index in chosen], loads, order.state_dict(), counts)

    def _round(self, step: int, count: int, counts: FilterCounts, loads: dict[int, EngineLoad]) -> list[PromptGroup]:
        """Sample and judge the groups of the next `count` places; fewer at an episode's end: no prompt comes twice."""
        order = self.parts.order
        places = order.take(count)
        behind = [place for place in places if order.episode_of(place) != order.episode_of(places[0])]
        if behind:
            order.give_back(behind)
            places = places[: -len(behind)]
        if not places:
            return []
        # The batch that the first place is in seeds them: a prompt that comes again has other responses.
        groups = self._groups(places, step, places[0] // order.batch_size)
        for engine, load in self.parts.episodes.finish(groups).items():
            loads.setdefault(engine, EngineLoad()).add(load)
        rewards = self.parts.reward(owners_of(groups), responses_of(groups), step)
        counts.judge(groups, rewards, groups[0].sampling.n)
        return groups

    def _groups(self, places: list[int], step: int, round: int) -> list[PromptGroup]:
        return [self.parts.group(place, step - 1, round) for place in places]


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


def make_batches(parts: Parts) -> Batches:
    """Choose the source by vllm.sync_mode, dynamic filtering and full_determinism."""
    config, rule = parts.config, rule_of(parts.config, parts.last)
    filtered = config.algo.dynamic_filtering_enable
    if rule.size is None and not (filtered and has_engines(config) and not config.train.full_determinism):
        return Rounds(parts, rule, filtered)
    return GroupStream(parts, rule, FilterCounts(config.algo.dynamic_filtering_range) if filtered else None)

"""Defines batches and the groups that they are made of, and makes a batch of finished groups.

`group_stream` asks which groups may begin and which make up a batch: pure functions of the state of the groups.

A group is one prompt with its n responses. It is begun when its prompt goes to an engine, while the engines have some
policy version, and it is finished when all of its responses are there (and, with dynamic sampling, judged). Step t
trains the actor from version t - 1 to t.

The bound: no token is older than `size` updates when it is trained on. A token of a group begun under version v has
version v or a later one, and step t trains version t - 1. So the group may be trained on in step v + size + 1 at the
latest: its deadline. Two rules keep every group within it, for any order in which groups finish.

Admission (`room`). Let step be the next one to train. A group may be begun if, with it, no more groups are waiting to
be trained on than steps `step` to `deadline` have places for: (v + size + 1 - step + 1) * batch. Before the batch of
step v + 1 is taken that is (size + 1) * batch, afterwards size * batch.

Nothing is begun while the next batch is ready: the trainer is the slower side then, and more would only be older when
their turn comes. That takes nothing from the engines that a step waits for.

The share. Of all the groups that step `step` trains on, at most `ahead` are begun before the engines have its policy,
version step - 1: until they have it no more than `ahead` groups may wait to be trained on, and from then on no more
than batch + ahead, so that `ahead` are left when the batch is taken. It only makes `room` smaller, so the bound holds;
and a batch can always become full, because a step that waits for one waits with version step - 1.

Choice (`choose`). A batch takes the earliest begun of the finished groups, if for every deadline d it leaves at most
(d - step) * batch groups of deadline d or earlier: what the steps after it, up to d, have places for. Else it waits.

Proof. Claim: at any time, for every d >= step, at most (d - step + 1) * batch groups that were not trained on have
deadline d or earlier; so none has a deadline before `step`. It holds at first. A new group has the latest deadline of
all, because versions only grow, so it counts for its own d and later ones alone, and `room` is the claim for those. A
batch is taken only if it leaves (d - step) * batch, which is the claim for step + 1. A group that is dropped makes the
counts smaller. No deadlock: where all groups are finished, the first `batch` of them by begin hold either all groups
of deadline d or `batch` of at most (d - step + 1) * batch, so the choice succeeds. No starvation: nobody misses a
deadline. The choice waits only if it must: the earliest begun have the earliest deadlines, so no other choice among
the finished groups would leave fewer for any d.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from slurm_rlhf.algorithms.reward_shaping import passes
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import FilteredAway
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.scored import Rewards, joined


@dataclass(slots=True)
class GroupState:
    """Says how old a group is, and whether it is finished; lists of groups are in the order of their begin."""

    version: int  # policy version in the engines when the group was begun
    finished: bool = False


def deadline(version: int, size: int) -> int:
    """Return the last step that may train on a group begun under policy `version`."""
    return version + size + 1


def room(groups: int, version: int, step: int, size: int, batch: int, last: int, ahead: int) -> int:
    """Count the groups that may be begun under policy `version`; negative or 0: none.

    groups: number of groups that were begun and neither trained on nor dropped. step: next step to be trained; last:
    last step of the run. size: the bound in updates; batch: groups of a step; ahead: how many of these may be begun
    under older policies.
    """
    within_bound = (min(deadline(version, size), last) - step + 1) * batch
    within_share = (batch if version >= step - 1 else 0) + ahead
    return min(within_bound, within_share) - groups


def choose(groups: Sequence[GroupState], step: int, size: int, batch: int) -> list[int] | None:
    """Return the indices of the groups that step `step` trains on; None: the step has to wait for some."""
    chosen = [index for index, group in enumerate(groups) if group.finished][:batch]
    if len(chosen) < batch:
        return None
    taken = set(chosen)
    left = Counter(deadline(group.version, size) for index, group in enumerate(groups) if index not in taken)
    sums = accumulate(left[last] for last in sorted(left))
    fits = (together <= max(0, last - step) * batch for last, together in zip(sorted(left), sums, strict=True))
    return chosen if all(fits) else None


def on_policy_room(passed: int, unfinished: int, begun: int, batch: int, at_once: int, most: int) -> int:
    """Count the groups that may be begun for a batch that is sampled and filtered under one policy.

    Each group that is dropped makes room for another at once, so engines do not wait for the last response before a
    refill begins. at_once: groups that may be in flight or kept at a time, at least `batch`; most: groups that may be
    begun for one batch.
    """
    return 0 if passed >= batch else min(at_once - passed - unfinished, most - begun)


def first_passing(verdicts: Sequence[bool | None], batch: int) -> list[int] | None:
    """Return the indices of the first `batch` groups that pass, in the order of their prompts.

    verdicts: one for each group in that order; None: not judged yet. Returns None while a group before the last of them
    is not judged: the batch waits, because groups that finish first have short responses.
    """
    chosen = [index for index, verdict in enumerate(verdicts) if verdict is not False][:batch]
    return chosen if len(chosen) == batch and all(verdicts[index] for index in chosen) else None


# A slow engine must not hold prompts that others could have started: when the last prompt is handed out, every engine
# should hold only prompts that it works on. So the reserve that an engine holds beyond its width shrinks with the
# number of prompts that are left. Source: Polychronopoulos and Kuck, Guided Self-Scheduling (1987).

# The reserve, a quarter of the width: an eighth for responses not sent back yet, an eighth for requests on their way.
_RESERVE = 4
# The reserve is at most a twelfth of an engine's share of what is left. So an engine that is up to six times slower
# than its peers has begun everything it holds when they take the last prompt.
_LAST_CHUNKS = 12


def allowance(left: int, engines: int, width: int) -> int:
    """Count the responses that an engine may owe: its width, and perhaps a reserve.

    left: responses that no engine was asked for; width: responses that an engine works on at once.
    """
    reserve = -(-width // _RESERVE)
    return width + (reserve if engines == 1 else min(reserve, left // (_LAST_CHUNKS * engines)))


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
    asked: list[Future[Rewards]] = field(default_factory=list)  # pending rewards of each group; empty: not asked for
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
    scoring: Future[Rewards] | None = None  # pending rewards, computed while other groups are sampled
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

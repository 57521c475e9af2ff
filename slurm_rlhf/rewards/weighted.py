"""Add up the rewards of several sources: sum of weight_i * clip(reward_i) over those that apply to a response."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from slurm_rlhf.config.schema_models import RewardPart
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import F32, LOST, Bool, Prompt, Trajectory
from slurm_rlhf.rewards.items import by_prompt
from slurm_rlhf.rewards.model import RewardSource
from slurm_rlhf.rewards.scored import Rewards


class WeightedRewards:
    """Asks all sources at once; each is a component of the reward by its name, and a metric."""

    def __init__(self, parts: Sequence[RewardPart], sources: Sequence[RewardSource | None]) -> None:
        """`sources[i]` computes `parts[i]`; None: the reward model, which comes later as `model`."""
        self._parts, self.sources = parts, sources
        self.model: RewardSource | None = None
        self.streams = None not in sources
        """The responses to a prompt may be scored while others are sampled."""

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks. Raises what a source raises."""
        asked = []
        for source in self.sources:
            asking = source or self.model
            assert asking is not None
            asked.append(in_thread(partial(asking, prompts, trajectories, step), "reward"))
        found = weighted(self._parts, [call.result() for call in asked], by_prompt(prompts))
        lost = np.array([one.finish_reason == LOST for one in trajectories], dtype=np.bool_)
        if lost.any():  # whatever other sources make of what is left of them
            found.skipped = lost if found.skipped is None else found.skipped | lost
        return found


def weighted(parts: Sequence[RewardPart], found: Sequence[Rewards], groups: Sequence[Sequence[int]]) -> Rewards:
    """Add up what the sources answered; where none applies the response is skipped, and a step names each failure.

    A component that does not apply is the mean of the others to the prompt, so that taken apart (gdpo) it adds nothing.
    """
    count = len(found[0].rewards)
    total, logs, components = np.zeros(count), dict[str, F32](), dict[str, F32]()
    skipped = np.stack([np.zeros(count, np.bool_) if each.skipped is None else each.skipped for each in found])
    failed = np.zeros(count, np.str_)
    for part, one, out in zip(parts, found, skipped, strict=True):
        values = np.clip(one.rewards, part.clip[0], part.clip[1]) if part.clip else one.rewards
        total += np.where(out, 0.0, part.weight * values)
        components[part.name] = _filled(values, out, groups)
        logs |= {f"{part.name}/{name}": each for name, each in (one.components | one.extra_logs).items()}
        if one.failed is not None:
            failed = np.where(failed == "", one.failed, failed)
    return Rewards(
        total.astype(np.float32),
        next((one.scores for one in found if one.scores is not None), None),
        logs,
        components,
        np.logical_and.reduce(skipped) if skipped.any() else None,
        failed if (failed != "").any() else None,
    )


def _filled(values: F32, out: Bool, groups: Sequence[Sequence[int]]) -> F32:
    filled = values.astype(np.float32)
    for places in map(np.array, groups):
        inside = places[~out[places]]
        filled[places[out[places]]] = values[inside].mean() if len(inside) else 0.0
    return filled

"""Rewards from the reward role, called as a reward function is."""

from __future__ import annotations

import numpy as np

from slurm_rlhf.control.handles import RoleHandle, gather
from slurm_rlhf.records import Prompt, Trajectory, pack
from slurm_rlhf.roles.sharding import shards
from slurm_rlhf.rollout.reward_values import Rewards, parse_answer


class ModelRewards:
    """Spreads responses over the ranks of the reward role."""

    def __init__(self, role: RoleHandle, max_tokens: int) -> None:
        """`max_tokens`: of a micro-batch."""
        self._role = role
        self._max_tokens = max_tokens

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory]) -> Rewards:
        """Rewards of `trajectories`, [N], from any thread. Raises RunError, and RewardError for a NaN."""
        experience = pack(trajectories, [0.0] * len(trajectories))
        # An evaluation may have any number of responses, and ranks need equally many: the last fills up.
        count, ranks = len(experience), self._role.world
        filled = [*range(count), *[count - 1] * (-count % ranks)]
        parts = shards(experience.select(filled), ranks, self._max_tokens)
        calls = [self._role.call(rank, "score", **part.to_wire()) for rank, part in enumerate(parts)]
        scores = np.full(len(filled), np.nan, dtype=np.float32)
        for part, answer in zip(parts, gather(calls), strict=True):
            scores[part.indices] = answer
        return parse_answer(scores[:count], count, "the reward model")

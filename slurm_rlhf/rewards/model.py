"""Where rewards come from: a function, or the reward role called as a function is; and how long they may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from slurm_rlhf.algorithms.batching import shards
from slurm_rlhf.algorithms.reward_scale import FixedScale, RewardScale, RunningScale
from slurm_rlhf.config.reward import reward_statistics
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import RoleHandle, gather
from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import Prompt, Trajectory, pack
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.values import Rewards, parse_answer


class ModelRewards:
    """Spreads responses over the ranks of the reward role."""

    def __init__(self, role: RoleHandle, max_tokens: int) -> None:
        """`max_tokens`: of a micro-batch."""
        self._role = role
        self._max_tokens = max_tokens

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Rewards of `trajectories`, [N], from any thread; a model knows no step. Raises RunError, and RewardError for
        a NaN.
        """
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


def reward_scale(config: Config) -> tuple[RewardScale | None, str]:
    """What reward.normalize_enable asks for, and a line that says so. Raises ModelError."""
    if not config.reward.normalize_enable:
        return None, ""
    model = config.reward.model_name_or_path
    known = reward_statistics(model) if model else None
    if known is None:
        return RunningScale(), "rewards are normalised by mean and standard deviation of all rewards of the run so far"
    mean, std = known
    return FixedScale(mean, std), f"rewards are normalised by {model}/config.json: mean {mean:g}, std {std:g}"


class Scoring:
    """Rewards for training and evaluation alike: computed in the background, waited for until a deadline.

    So a signal interrupts the main thread while it waits, whatever the user's function does.
    """

    def __init__(self, source: RewardFunction | ModelRewards, timeout_s: float) -> None:
        """`timeout_s`: of a function. A role's calls have deadlines of their own."""
        self._source = source
        self._timeout_s = timeout_s if isinstance(source, RewardFunction) else None

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        """Rewards of `trajectories`, [N]; `step` as of `RewardFunction`. Blocks; raises as `wait`."""
        return self.wait(self.begin(prompts, trajectories, step), len(trajectories))

    def begin(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Future[Rewards]:
        """Start computing the rewards of `trajectories`."""
        return in_background(self._source, prompts, trajectories, step)

    def wait(self, scored: Future[Rewards], count: int) -> Rewards:
        """The answer for `count` responses. Raises RewardError when it takes too long, and what the source raised."""
        try:
            return scored.result(self._timeout_s)
        except TimeoutError:
            if scored.done():  # the function's own
                raise
            raise RewardError(
                f"the reward function did not return within {self._timeout_s:g} s for {count} responses; make it "
                "faster or raise timeout.reward"
            ) from None


def in_background(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call `function` in a thread that does not keep the process alive, should it hang."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future

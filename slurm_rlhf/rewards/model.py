"""Compute rewards in the background, by a function or by the reward model's ranks, and wait until a deadline."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from slurm_rlhf.algorithms.reward_shaping import FixedScale, RewardScale, RunningScale
from slurm_rlhf.config.check import reward_statistics
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import LOST, Prompt, Trajectory, pack
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.scored import Rewards, joined, parse_answer
from slurm_rlhf.wire.calls import ForwardBatch, RewardCalls
from slurm_rlhf.wire.handles import RoleHandle, gather, send_shards

RewardSource = Callable[[list[Prompt], list[Trajectory], int], Rewards]
"""Computes the rewards of responses, each with its prompt; the number is that of the training step."""


@dataclass(frozen=True, slots=True)
class ModelRewards:
    """Spread responses over the ranks of the reward role."""

    role: RoleHandle[RewardCalls]
    max_tokens: int  # tokens of a micro-batch at most

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N], from any thread; a model knows no step.

        Raises RunError, and RewardError for a NaN.
        """
        experience = pack(trajectories, [0.0] * len(trajectories))
        # An evaluation may have any number of responses, and ranks need equally many: the last fills up.
        count = len(experience)
        filled = [*range(count), *[count - 1] * (-count % self.role.world)]
        whole = experience.select(filled)
        parts, calls = send_shards(self.role, RewardCalls.score, ForwardBatch, whole, self.max_tokens)
        scores = np.full(len(filled), np.nan, dtype=np.float32)
        for part, answer in zip(parts, gather(calls), strict=True):
            scores[part.indices] = answer
        return parse_answer(scores[:count], count, "the reward model")


def episode_rewards(prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
    """Return the rewards, scores and logs that environments have given `trajectories`, [N]; 0 without environments.

    Lost episodes are skipped.
    """
    lost = np.array([one.finish_reason == LOST for one in trajectories], dtype=np.bool_)
    scored = any(one.score is not None for one in trajectories)
    names = sorted({name for one in trajectories for name in one.logs})
    logs = {name: [one.logs[name] for one in trajectories if name in one.logs] for name in names}
    return Rewards(
        np.array([one.reward for one in trajectories], dtype=np.float32),
        np.array([one.score or 0.0 for one in trajectories], dtype=np.float32) if scored else None,
        {name: np.array([np.mean(values)], dtype=np.float32) for name, values in logs.items()},
        skipped=lost if lost.any() else None,
    )


def reward_scale(config: Config) -> tuple[RewardScale | None, str]:
    """Make the scale that reward.normalize_enable asks for, and a line that says so. Raises ModelError."""
    if not config.reward.normalize_enable:
        return None, ""
    model = config.reward.model_name_or_path
    known = reward_statistics(model) if model else None
    if known is None:
        return RunningScale(), "rewards are normalised by mean and standard deviation of all rewards of the run so far"
    mean, std = known
    return FixedScale(mean, std), f"rewards are normalised by {model}/config.json: mean {mean:g}, std {std:g}"


@dataclass(frozen=True, slots=True)
class Scoring:
    """Compute rewards for training and evaluation in the background, and wait for them until a deadline.

    So a signal interrupts the main thread while it waits, whatever the user's function does.
    """

    source: RewardSource
    timeout_s: float  # how long a reward function may take; calls to a reward model have deadlines of their own
    printed: Path | None = None  # the file for the traceback of what a reward function raises; None: there is none
    note: Callable[[str], None] = lambda text: None  # tells the user of rewards that failed

    @property
    def streams(self) -> bool:
        """Tell whether the responses to a prompt may be scored while others are sampled."""
        return getattr(self.source, "streams", False)

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; `step` as in `RewardFunction`. Blocks; raises as `wait`."""
        return self.wait([self.begin(prompts, trajectories, step)], len(trajectories), step)

    def begin(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Future[Rewards]:
        """Start computing the rewards of `trajectories`."""
        return in_thread(partial(self._call, prompts, trajectories, step), "reward")

    def _call(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        try:
            return self.source(prompts, trajectories, step)
        except RewardError as error:
            if self.printed is None or not isinstance(self.source, RewardFunction):
                raise
            with self.printed.open("a", encoding="utf-8", errors="replace") as log:
                traceback.print_exception(error, file=log)
            raise RewardError(f"{error} (traceback: {self.printed})") from error

    def wait(self, asked: Sequence[Future[Rewards]], count: int, step: int) -> Rewards:
        """Wait for the rewards of `count` responses. Raises RewardError after the deadline, or what it raised."""
        timeout_s = self.timeout_s if isinstance(self.source, RewardFunction) else None
        try:
            found = joined([scored.result(timeout_s) for scored in asked])
            self._tell_failures(found, step)
            return found
        except TimeoutError:
            if timeout_s is None or all(scored.done() for scored in asked):  # raised by the source itself
                raise
            raise RewardError(
                f"the reward function did not return within {timeout_s:g} s for {count} responses; make it "
                "faster or raise timeout.reward"
            ) from None

    def _tell_failures(self, found: Rewards, step: int) -> None:
        """Tell the user how many responses have no reward of their own, and why. Raises RewardError if none has one."""
        if found.failed is None:
            return
        reasons = [why for why in found.failed.tolist() if why]
        kinds = Counter(why.partition(":")[0] for why in reasons)
        listed = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        said = f"the rewards of {kinds.total()} of {len(found.rewards)} responses failed ({listed})"
        said += f", the first: {reasons[0].splitlines()[0]}"
        said += f"; {self.printed} shows them" if self.printed else ""
        if kinds.total() == len(found.rewards) > 1:
            raise RewardError(said)
        self.note(f"warning: step {step}: {said}")

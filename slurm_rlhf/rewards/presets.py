"""Ready rewards, by the names that `reward.preset` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.code import CodeReward
from slurm_rlhf.rewards.function import Rewards, parse_answer
from slurm_rlhf.rewards.items import Item, items_of
from slurm_rlhf.rewards.reasoning_gym import TaskReward


class Preset(Protocol):
    """Scores responses."""

    def about(self) -> tuple[str, bool]:
        """Return its name in messages, and whether a reward may be None."""

    def answer(self, items: Sequence[Item], step: int) -> dict[str, list[float]]:
        """Return what a reward function may return. Raises RewardError."""


PRESETS: dict[str, Callable[[str], Preset]] = {"code": CodeReward, "reasoning_gym": lambda sandbox: TaskReward()}
"""Name -> how it is made with `reward.sandbox`."""


def served(preset: str, sandbox: str) -> Any:
    """Make a preset. Raises ConfigError where this node has no sandbox for it."""
    return PRESETS[preset](sandbox)


class PresetRewards:
    """Calls a preset in this process."""

    def __init__(self, config: Config) -> None:
        """Make the preset. Raises ConfigError as `served`."""
        self._preset, self._input_key = served(config.reward.preset, config.reward.sandbox), config.data.input_key

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks. Raises RewardError."""
        answer = self._preset.answer(items_of(prompts, trajectories, self._input_key), step)
        return parse_answer(answer, len(trajectories), self._preset.about()[0])

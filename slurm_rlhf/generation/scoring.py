"""Scores of responses by the user's reward function: a row that it cannot score is one bad row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.algorithms.registry import load_plugins
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.model import Scoring
from slurm_rlhf.rewards.values import Rewards


@dataclass(slots=True)
class Scores:
    """Calls the function for the responses that have come together; without one there are no scores."""

    scoring: Scoring | None
    proven: bool = False  # it has scored a response

    @classmethod
    def of(cls, config: Config, printed: Path) -> Scores:
        """Load the function that the configuration names, if it names one. Raises ConfigError, RewardError."""
        load_plugins(config.train.plugins)
        if not config.reward.remote_url and not config.reward.function:
            return cls(None)
        return cls(Scoring(RewardFunction.of(config.reward), config.timeout.reward, printed))

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory]) -> list[tuple[float | None, str]]:
        """Return the score of each response, or None and what is wrong; `prompts[i]` is that of `trajectories[i]`.

        After a failure each row is scored alone, to find the one that it cannot score. Raises RewardError as long as
        the function has never scored anything.
        """
        if self.scoring is None or not trajectories:
            return [(None, "")] * len(trajectories)
        try:
            return self._score(prompts, trajectories)
        except RewardError as error:
            if len({prompt.index for prompt in prompts}) == 1:
                if not self.proven:
                    raise
                return [(None, str(error))] * len(trajectories)
        found: list[tuple[float | None, str]] = [(None, "")] * len(trajectories)
        for row in dict.fromkeys(prompt.index for prompt in prompts):
            places = [place for place, prompt in enumerate(prompts) if prompt.index == row]
            alone = self([prompts[place] for place in places], [trajectories[place] for place in places])
            for place, score in zip(places, alone, strict=True):
                found[place] = score
        return found

    def _score(self, prompts: list[Prompt], trajectories: list[Trajectory]) -> list[tuple[float | None, str]]:
        assert self.scoring is not None
        answer: Rewards = self.scoring(prompts, trajectories, 0)
        self.proven = True
        # What is told of a response is its quality by the task's own measure, where the function knows one.
        values = answer.rewards if answer.scores is None else answer.scores
        return [(float(value), "") if math.isfinite(value) else (None, f"score {value}") for value in values]

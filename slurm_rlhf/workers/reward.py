"""A rank of the reward role: a frozen model that scores whole responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.attention import attention_kernel
from slurm_rlhf.training.frozen_models import RewardModel
from slurm_rlhf.workers.release_memory import taking_turns
from slurm_rlhf.workers.worker import Role


class RewardRole(Role):
    attention = staticmethod(attention_kernel)

    def calls(self) -> dict[str, Callable[..., Any]]:
        return taking_turns(self.config, {"start": self.start, "score": self.score})

    def start(self, total_steps: int) -> str:
        """Load the model. `total_steps` is of no use to a model that is not trained. Answers how it scores."""
        self.model = RewardModel(self.config)
        return self.model.description

    def score(self, experience: dict[str, Any], micro: list[list[int]]) -> F32:
        return self.model.score(Experience.from_wire(experience), micro)

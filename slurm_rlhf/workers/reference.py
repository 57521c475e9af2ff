"""A rank of the reference role: the frozen policy that the KL penalty measures against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_rlhf.records import Experience
from slurm_rlhf.training.attention import attention_kernel
from slurm_rlhf.training.frozen_models import FrozenPolicy
from slurm_rlhf.workers.release_memory import taking_turns
from slurm_rlhf.workers.worker import Role


class ReferenceRole(Role):
    attention = staticmethod(attention_kernel)

    def calls(self) -> dict[str, Callable[..., Any]]:
        return taking_turns(self.config, {"start": self.start, "logprobs": self.logprobs})

    def start(self, total_steps: int) -> None:
        """Load the model. `total_steps` is of no use to a model that is not trained."""
        self.model = FrozenPolicy(self.config)

    def logprobs(self, experience: dict[str, Any], micro: list[list[int]]) -> dict[str, Any]:
        return self.model.logprobs(Experience.from_wire(experience), micro)

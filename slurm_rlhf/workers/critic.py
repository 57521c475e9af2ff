"""A rank of the critic role: the value model in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_rlhf.records import Experience
from slurm_rlhf.training.attention import attention_kernel
from slurm_rlhf.training.trainers import ValueTrainer
from slurm_rlhf.workers.release_memory import taking_turns
from slurm_rlhf.workers.worker import Role


class CriticRole(Role):
    attention = staticmethod(attention_kernel)

    def calls(self) -> dict[str, Callable[..., Any]]:
        calls: dict[str, Callable[..., Any]] = {
            "start": self.start,
            "values": self.values,
            "train_step": self.train_step,
            "save": lambda path: self.trainer.save(Path(path)),
            "load": lambda path: self.trainer.load(Path(path)),
            "sleep": self.sleep,
            "wake_up": self.wake_up,
        }
        return taking_turns(self.config, calls)

    def sleep(self) -> None:
        """Put the optimizer's states away until `wake_up`."""
        self.trainer.engine.sleep()

    def wake_up(self) -> None:
        self.trainer.engine.wake_up()

    def start(self, total_steps: int) -> str:
        """Load the model. Answers what it started from, for the user."""
        self.trainer = ValueTrainer(self.config, total_steps)
        return self.trainer.origin

    def values(self, experience: dict[str, Any], micro: list[list[int]]) -> dict[str, Any]:
        return self.trainer.values(Experience.from_wire(experience), micro)

    def train_step(self, experience: dict[str, Any], micro: list[list[int]], denominator: float) -> dict[str, float]:
        return self.trainer.train_step(Experience.from_wire(experience), micro, denominator)

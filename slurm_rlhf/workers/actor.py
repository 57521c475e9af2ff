"""A rank of the actor role: the policy in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.records import Experience
from slurm_rlhf.training.attention import attention_kernel
from slurm_rlhf.training.trainers import PolicyTrainer
from slurm_rlhf.weight_sync.endpoints import ActorEnd
from slurm_rlhf.workers.release_memory import taking_turns
from slurm_rlhf.workers.worker import Role, Seat


class ActorRole(Role):
    attention = staticmethod(attention_kernel)

    def __init__(self, config: Config, seat: Seat, client: ControlClient) -> None:
        super().__init__(config, seat, client)
        self.sync = ActorEnd(config, f"{seat.role} {seat.rank}")

    def calls(self) -> dict[str, Callable[..., Any]]:
        calls: dict[str, Callable[..., Any]] = {
            "start": self.start,
            "logprobs": self.logprobs,
            "self_check": self.self_check,
            "train_step": self.train_step,
            "save": lambda path: self.trainer.save(Path(path)),
            "load": lambda path: self.trainer.load(Path(path)),
            "export": lambda path: self.trainer.export_hf(Path(path)),
            "sync_listen": self.sync.listen,
            "sync_join": self.sync.join,
            "sync_push": self.sync_push,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
        }
        return taking_turns(self.config, calls)

    def sleep(self) -> None:
        """Put the optimizer's states away until `wake_up`."""
        self.trainer.engine.sleep()

    def wake_up(self) -> None:
        self.trainer.engine.wake_up()

    def start(self, total_steps: int) -> list[list[Any]]:
        """Load the model; answers its parameters as [[name, shape, dtype], ...]."""
        self.trainer = PolicyTrainer(self.config, total_steps)
        return self.trainer.describe()

    def logprobs(self, experience: dict[str, Any], micro: list[list[int]]) -> dict[str, Any]:
        return self.trainer.logprobs(Experience.from_wire(experience), micro)

    def self_check(self, experience: dict[str, Any], micro: list[list[int]]) -> dict[str, Any]:
        return self.trainer.self_check(Experience.from_wire(experience), micro)

    def train_step(self, experience: dict[str, Any], micro: list[list[int]], denominator: float) -> dict[str, float]:
        return self.trainer.train_step(Experience.from_wire(experience), micro, denominator)

    def sync_push(self, version: int) -> dict[str, Any]:
        """Send this rank's share of the weights as policy `version`."""
        return self.sync.push(self.trainer.local_parameters(), version)

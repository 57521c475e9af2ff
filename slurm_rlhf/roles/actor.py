"""A rank of the actor role: the policy in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rlhf.records import Experience
from slurm_rlhf.roles.role import Role
from slurm_rlhf.sync.push import Sender
from slurm_rlhf.sync.session import join_as_sender
from slurm_rlhf.sync.store import SyncStore
from slurm_rlhf.training.policy import PolicyTrainer


class ActorRole(Role):
    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "start": self.start,
            "logprobs": self.logprobs,
            "train_step": self.train_step,
            "save": lambda path: self.trainer.save(Path(path)),
            "load": lambda path: self.trainer.load(Path(path)),
            "export": lambda path: self.trainer.export_hf(Path(path)),
            "sync_listen": self.sync_listen,
            "sync_join": self.sync_join,
            "sync_push": self.sync_push,
        }

    def start(self, total_steps: int) -> list[list[Any]]:
        """Load the model; answers its parameters as [[name, shape, dtype], ...]."""
        self.trainer = PolicyTrainer(self.config, total_steps)
        self.sender: Sender | None = None
        return self.trainer.describe()

    def logprobs(self, experience: dict[str, Any], micro: list[list[int]]) -> dict[str, Any]:
        return self.trainer.logprobs(Experience.from_wire(experience), micro)

    def train_step(self, experience: dict[str, Any], micro: list[list[int]], denominator: float) -> dict[str, float]:
        return self.trainer.train_step(Experience.from_wire(experience), micro, denominator)

    def sync_listen(self, host: str) -> dict[str, Any]:
        """Open the store where the members of a weight transfer meet."""
        self.store = SyncStore.listen(host, self.config.timeout.sync)
        return {"host": self.store.host, "port": self.store.port}

    def sync_join(self, parameters: list[list[Any]], **group: Any) -> None:
        """Join the group of a weight transfer; `parameters` is what the engines will get."""
        if self.sender is not None:
            self.sender.group.close()
        self.sender = join_as_sender(self.config, f"{self.seat.role} {self.seat.rank}", parameters, **group)

    def sync_push(self, version: int) -> dict[str, float]:
        """Send this rank's share of the weights as policy `version`."""
        assert self.sender is not None
        return asdict(self.sender.push(self.trainer.held(), version))

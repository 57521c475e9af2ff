"""Weight sync as the conductor sees it: who joins the group, when weights move, and that they arrived."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import RoleHandle, gather

SENDER = 0  # the actor rank that sends; it is rank 0 of the sync group


@dataclass(slots=True)
class WeightSync:
    """Actor rank 0 and every engine form a group of their own, outside the process groups of their roles."""

    config: Config
    actor: RoleHandle
    rollout: RoleHandle
    host: str  # of the sender, as the engines' nodes know it
    generation: int = field(default=0, init=False)  # of the group; a new one after a failure has a new name

    def connect(self, parameters: list[list[Any]]) -> None:
        """Form the group. `parameters` [[name, shape, dtype], ...] is what the actor will send."""
        self.generation += 1
        where = self.actor.call(SENDER, "sync_listen", host=self.host).result()
        group = {
            **where,
            "name": f"weights.{os.getpid()}.{self.generation}",
            "world": 1 + self.rollout.world,
            "parameters": parameters,
        }
        joins = [self.actor.call(SENDER, "sync_join", rank=0, **group)]
        joins += [
            self.rollout.call(engine, "sync_join", rank=1 + engine, **group) for engine in range(self.rollout.world)
        ]
        gather(joins)

    def update(self, version: int) -> dict[str, float]:
        """Bring the actor's weights into every engine as policy `version`. Raises SyncError through RemoteError."""
        pushes = self.actor.start_all("sync_push", version=version)
        receipts = self.rollout.start_all("sync_receive", version=version)
        sent = gather([*pushes, *receipts])[SENDER]
        return {"perf/sync_bytes": float(sent["bytes"]), "time/sync_transfer": float(sent["seconds"])}

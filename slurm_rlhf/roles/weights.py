"""Weight sync as the conductor sees it: who joins the group, when weights move, and that they arrived."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import EngineHandle, RoleHandle, gather

SENDER = 0  # the actor rank that sends; it is rank 0 of the sync group


@dataclass(slots=True)
class WeightSync:
    """Actor rank 0 and all ranks of engines form a group of their own, outside the process groups of their roles."""

    config: Config
    actor: RoleHandle
    rollout: EngineHandle
    host: str  # of the sender, as the engines' nodes know it
    generation: int = field(default=0, init=False)  # of the group; each new one has a new name
    engines: list[int] = field(default_factory=list, init=False)  # its receivers

    def connect(self, parameters: list[list[Any]], engines: list[int]) -> None:
        """Form the group, in place of the one before. `parameters` [[name, shape, dtype], ...]: what the actor sends.

        Every rank of an engine is a member: the leader's rank is told, its followers have the ranks behind it.
        """
        self.generation += 1
        where = self.actor.call(SENDER, "sync_listen", host=self.host).result()
        group = {
            **where,
            "name": f"weights.{os.getpid()}.{self.generation}",
            "world": 1 + len(engines) * self.rollout.width,
            "parameters": parameters,
        }
        joins = [self.actor.call(SENDER, "sync_join", rank=0, **group)]
        joins += [
            self.rollout.call(engine, "sync_join", rank=1 + place * self.rollout.width, **group)
            for place, engine in enumerate(engines)
        ]
        gather(joins)
        self.engines = list(engines)

    def update(self, version: int) -> dict[str, float]:
        """Bring the actor's weights into the group's engines as policy `version`. SyncError comes as RemoteError."""
        pushes = self.actor.start_all("sync_push", version=version)
        receipts = [self.rollout.call(engine, "sync_receive", version=version) for engine in self.engines]
        sent = gather([*pushes, *receipts])[SENDER]
        return {"perf/sync_bytes": float(sent["bytes"]), "time/sync_transfer": float(sent["seconds"])}

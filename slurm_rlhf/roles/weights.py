"""Weight sync as the conductor sees it: who joins the group, when weights move, and that they arrived."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import RoleHandle, gather

LEADER = 0  # the actor rank that leads an update; it is rank 0 of the sync group


@dataclass(slots=True)
class WeightSync:
    """All actor ranks and the ranks of the engines form a group of their own, outside the groups of their roles."""

    config: Config
    actor: RoleHandle
    rollout: RoleHandle
    host: str  # of the leader, as the engines' nodes know it
    generation: int = field(default=0, init=False)  # of the group; a new one after a failure has a new name
    engines: list[int] = field(default_factory=list, init=False)  # that take part
    _where: dict[str, Any] = field(default_factory=dict, init=False)  # the store, which serves all generations

    def connect(self, parameters: list[list[Any]], engines: list[int]) -> None:
        """Form the group anew. `parameters` [[name, shape, dtype], ...] is what the actor will send."""
        self.generation += 1
        self.engines = list(engines)
        self._where = self._where or self.actor.call(LEADER, "sync_listen", host=self.host).result()
        tp = self.config.vllm.tensor_parallel_size
        group = {
            **self._where,
            "name": f"weights.{os.getpid()}.{self.generation}",
            "actors": self.actor.world,
            "world": self.actor.world + tp * len(engines),
            "parameters": parameters,
        }
        joins = self.actor.start_all("sync_join", [{"rank": rank} for rank in range(self.actor.world)], **group)
        joins += [
            self.rollout.call(engine, "sync_join", rank=self.actor.world + tp * place, **group)
            for place, engine in enumerate(engines)
        ]
        gather(joins)

    def update(self, version: int) -> dict[str, float]:
        """Bring the actor's weights into every engine as policy `version`. Raises SyncError through RemoteError."""
        pushes = self.actor.start_all("sync_push", version=version)
        receipts = [self.rollout.call(engine, "sync_receive", version=version) for engine in self.engines]
        sent = gather([*pushes, *receipts])[: len(pushes)]
        return {
            "perf/sync_bytes": float(sent[LEADER]["nbytes"]),
            "time/sync_transfer": float(sent[LEADER]["seconds"]),
            "time/sync_checksum": max(float(stats["checksum_s"]) for stats in sent),
        }

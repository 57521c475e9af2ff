"""Weight sync as the conductor sees it: who joins the group, when weights move, and that they arrived."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import EngineHandle, RoleHandle, gather
from slurm_rlhf.errors import RemoteError, SyncError

log = logging.getLogger(__name__)

LEADER = 0  # the actor rank that leads an update; it is rank 0 of the sync group


@dataclass(slots=True)
class WeightSync:
    """All actor ranks and the ranks of the engines form a group of their own, outside the groups of their roles."""

    config: Config
    actor: RoleHandle
    rollout: EngineHandle
    host: str  # of the leader, as the engines' nodes know it
    generation: int = field(default=0, init=False)  # of the group; a new one after a failure has a new name
    engines: list[int] = field(default_factory=list, init=False)  # that take part
    way: dict[str, Any] = field(default_factory=dict, init=False)  # how the leader is connected, for the user
    _parameters: list[list[Any]] = field(default_factory=list, init=False)
    _where: dict[str, Any] = field(default_factory=dict, init=False)  # the store, which serves all generations
    _backend: dict[str, str] = field(default_factory=dict, init=False)  # the fallback, once it is in use

    def connect(self, parameters: list[list[Any]], engines: list[int]) -> None:
        """Form the group anew. `parameters` [[name, shape, dtype], ...] is what the actor will send.

        Goes over to sync.fallback where the members cannot be connected. Raises RemoteError naming who cannot.
        """
        self._parameters, self.engines = parameters, list(engines)
        self._where = self._where or self.actor.call(LEADER, "sync_listen", host=self.host).result()
        try:
            self._join()
        except RemoteError as error:
            if not self._fall_back(str(error)):
                raise
            self._join()

    def update(self, version: int) -> dict[str, float]:
        """Bring the actor's weights into every engine as policy `version`.

        An update that is cut off is repeated, whole, over a new group: once, and once more over sync.fallback. Raises
        RemoteError for weights that arrived different, and RunError naming the member when it is cut off again.
        """
        metrics, why = self._update(version)
        if why:
            log.warning("%s; once more over a new group", why)
            self.connect(self._parameters, self.engines)
            metrics, why = self._update(version)
        if why and self._fall_back(why):
            self._join()
            metrics, why = self._update(version)
        if why:
            raise SyncError(why)
        return metrics

    def _update(self, version: int) -> tuple[dict[str, float], str]:
        """Metrics, or why it was cut off: every member has let go of the group then."""
        pushes = self.actor.start_all("sync_push", version=version)
        receipts = [self.rollout.call(engine, "sync_receive", version=version) for engine in self.engines]
        answers = gather([*pushes, *receipts])
        broken = [answer["broken"] for answer in answers if "broken" in answer]
        if broken:
            return {}, str(broken[0])
        leader = answers[LEADER]
        metrics = {
            "perf/sync_bytes": float(leader["nbytes"]),
            "perf/sync_group": float(self.generation),
            "time/sync_transfer": float(leader["seconds"]),
            "time/sync_checksum": max(float(answer["checksum_s"]) for answer in answers),
        }
        return metrics, ""

    def _join(self) -> None:
        self.generation += 1
        tp = self.rollout.width
        group = {
            **self._where,
            **self._backend,
            "name": f"weights.{os.getpid()}.{self.generation}",
            "actors": self.actor.world,
            "world": self.actor.world + tp * len(self.engines),
            "parameters": self._parameters,
        }
        joins = self.actor.start_all("sync_join", [{"rank": rank} for rank in range(self.actor.world)], **group)
        joins += [
            self.rollout.call(engine, "sync_join", rank=self.actor.world + tp * place, **group)
            for place, engine in enumerate(self.engines)
        ]
        answers = gather(joins)
        self.way = answers[LEADER]
        for member in {tuple(sorted(answer.items())) for answer in answers if answer}:
            log.info("weight transfer group %d: %s", self.generation, dict(member))

    def _fall_back(self, why: str) -> bool:
        """Whether there is another backend to go over to; it stays in use."""
        if self.config.sync.fallback == "none" or self._backend:
            return False
        log.warning("%s; going on over sync.fallback = %s", why, self.config.sync.fallback)
        # The interface that was asked for may be what does not work.
        self._backend = {"backend": self.config.sync.fallback, "interface": ""}
        return True

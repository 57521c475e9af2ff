"""Weight updates as the conductor leads them: who joins the group, and that the weights arrived."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, field, replace

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.calls import (
    ActorCalls,
    EngineCalls,
    ListenRequest,
    SyncGroupRequest,
    SyncUpdateRequest,
)
from slurm_rlhf.control.handles import EngineHandle, RoleHandle, gather
from slurm_rlhf.errors import RemoteError, SyncError
from slurm_rlhf.records import ParameterSpec, StoreAddress, SyncConnection

log = logging.getLogger(__name__)

LEADER = 0  # the actor rank that leads an update; it is rank 0 of the sync group


@dataclass(slots=True)
class WeightSync:
    """All actor ranks and the ranks of the engines form a group of their own, outside the groups of their roles."""

    config: Config
    actor: RoleHandle[ActorCalls]
    rollout: EngineHandle
    host: str  # of the leader, as the engines' nodes know it
    generation: int = field(default=0, init=False)  # of the group; a new one after a failure has a new name
    engines: list[int] = field(default_factory=list, init=False)  # that take part
    connection: SyncConnection | None = field(default=None, init=False)  # the leader's, for the user
    _parameters: list[ParameterSpec] = field(default_factory=list, init=False)
    _store: StoreAddress | None = field(default=None, init=False)  # serves all generations
    _fallback: bool = field(default=False, init=False)  # sync.fallback is in use

    def connect(self, parameters: list[ParameterSpec], engines: list[int]) -> None:
        """Form the group anew. `parameters` are what the actor will send.

        Goes over to sync.fallback where the members cannot be connected. Raises RemoteError naming who cannot.
        """
        self._parameters, self.engines = parameters, list(engines)
        if self._store is None:
            self._store = self.actor.call(LEADER, ActorCalls.sync_listen, ListenRequest(self.host)).result()
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
        """Answer the metrics, or why it was cut off: every member has let go of the group then."""
        request = SyncUpdateRequest(version)
        sends = self.actor.start_all(ActorCalls.sync_push, request)
        receipts = [self.rollout.call(engine, EngineCalls.sync_receive, request) for engine in self.engines]
        reports = gather([*sends, *receipts])
        broken = [report.broken for report in reports if report.broken]
        if broken:
            return {}, broken[0]
        leader = reports[LEADER]
        metrics = {
            "perf/sync_bytes": float(leader.nbytes),
            "perf/sync_group": float(self.generation),
            "time/sync_transfer": leader.seconds,
            "time/sync_checksum": max(report.checksum_s for report in reports),
        }
        return metrics, ""

    def _join(self) -> None:
        assert self._store is not None
        self.generation += 1
        actors, tp = self.actor.world, self.rollout.width
        group = SyncGroupRequest(
            name=f"weights.{os.getpid()}.{self.generation}",
            rank=0,
            world=actors + tp * len(self.engines),
            actors=actors,
            host=self._store.host,
            port=self._store.port,
            parameters=self._parameters,
            # The interface that was asked for may be what does not work.
            backend=self.config.sync.fallback if self._fallback else None,
            interface="" if self._fallback else None,
        )
        joins = self.actor.start_each(ActorCalls.sync_join, [replace(group, rank=rank) for rank in range(actors)])
        for place, engine in enumerate(self.engines):
            joins.append(self.rollout.call(engine, EngineCalls.sync_join, replace(group, rank=actors + tp * place)))
        connections = gather(joins)
        self.connection = connections[LEADER]
        for member in {tuple(sorted(asdict(connection).items())) for connection in connections}:
            log.info("weight transfer group %d: %s", self.generation, dict(member))

    def _fall_back(self, why: str) -> bool:
        """Go over to sync.fallback for good; False when there is none, or it is in use already."""
        if self.config.sync.fallback == "none" or self._fallback:
            return False
        log.warning("%s; going on over sync.fallback = %s", why, self.config.sync.fallback)
        self._fallback = True
        return True

"""Leads the updates that bring the actor's weights into all engines. An engine may be lost during one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import asdict, replace

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RemoteError, SyncError, of_hang
from slurm_rlhf.records import ParameterSpec, SyncConnection, SyncReport
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import (
    ActorCalls,
    EngineCalls,
    SyncGroupRequest,
)
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle, gather

log = logging.getLogger(__name__)

LEADER = 0  # the actor rank that leads an update; it is rank 0 of the sync group


@dataclass(slots=True)
class WeightSync:
    """Leads weight updates: actor and engine ranks form a group of their own, outside those of their roles."""

    config: Config
    actor: RoleHandle[ActorCalls]
    rollout: EngineHandle
    host: str  # the leader's node, as the engines' nodes know it
    generation: int = 0  # number of the group; a new one after a failure has a new name
    fell_back: bool = False  # sync.fallback is in use
    engines: list[int] = field(default_factory=list, init=False)  # numbers of the engines that take part
    connection: SyncConnection | None = field(default=None, init=False)  # the leader's, for the user
    _parameters: list[ParameterSpec] = field(default_factory=list, init=False)

    def connect(self, parameters: list[ParameterSpec], engines: list[int]) -> None:
        """Form the group anew. `parameters` are what the actor will send.

        Goes over to sync.fallback where the members cannot be connected. Raises RemoteError naming who cannot, and
        EngineLost.
        """
        self._parameters, self.engines = parameters, list(engines)
        try:
            self._join()
        except RemoteError as error:
            if not self._fall_back(str(error)):
                raise
            self._join()

    def update(self, version: int) -> dict[str, float]:
        """Bring the actor's weights into every engine as policy `version`.

        An update that is cut off is repeated, whole, over a new group: once, and once more over sync.fallback. Raises
        RemoteError for weights that arrived different, RunError naming the member when it is cut off again, and
        EngineLost when it was cut off because an engine is gone.
        """
        metrics, cut = self._update(version)
        if cut:
            log.warning("%s; once more over a new group", cut.broken, extra=of_hang(cut.silent))
            self.connect(self._parameters, self.engines)
            metrics, cut = self._update(version)
        if cut and self._fall_back(cut.broken):
            self._join()
            metrics, cut = self._update(version)
        if cut:
            raise SyncError(cut.broken, hang=cut.silent)
        return metrics

    def _update(self, version: int) -> tuple[dict[str, float], SyncReport | None]:
        """Return the metrics, or the report of a member that was cut off: all members have left the group then."""
        sends = self.actor.start_all(ActorCalls.sync_push, version)
        receipts = [self.rollout.call(engine, EngineCalls.sync_receive, version) for engine in self.engines]
        settle_update(self.rollout, sends, dict(zip(receipts, self.engines, strict=True)))
        reports = gather([*sends, *receipts])
        for report in reports:
            if report.broken:
                return {}, report
        leader = reports[LEADER]
        metrics = {
            "perf/sync_bytes": float(leader.nbytes),
            "perf/sync_group": float(self.generation),
            "time/sync_transfer": leader.seconds,
            "time/sync_checksum": max(report.checksum_s for report in reports),
        }
        if self.connection is not None and self.connection.mbits and leader.seconds > 0:
            # Every node of engines receives all bytes.
            metrics["perf/sync_link_share"] = 8e-6 * leader.nbytes / leader.seconds / self.connection.mbits
        return metrics, None

    def _join(self) -> None:
        self.generation += 1
        port = self.actor.call(LEADER, ActorCalls.sync_listen, self.host).result()
        actors, tp = self.actor.world, self.rollout.width
        group = SyncGroupRequest(
            name=f"weights.{os.getpid()}.{self.generation}",
            rank=0,
            world=actors + tp * len(self.engines),
            actors=actors,
            host=self.host,
            port=port,
            parameters=self._parameters,
            # The interface in the configuration may be the cause.
            backend=self.config.sync.fallback if self.fell_back else None,
            interface="" if self.fell_back else None,
        )
        joins = self.actor.start_each(ActorCalls.sync_join, [replace(group, rank=rank) for rank in range(actors)])
        engines = [
            self.rollout.call(engine, EngineCalls.sync_join, replace(group, rank=actors + tp * place))
            for place, engine in enumerate(self.engines)
        ]
        forming = _Transfer(self.rollout, joins, dict(zip(engines, self.engines, strict=True)))
        _settle(forming, partial(_end_forming, self.actor))
        connections = gather([*joins, *engines])
        self.connection = connections[LEADER]
        for member in {tuple(sorted(asdict(connection).items())) for connection in connections}:
            log.info("weight transfer group %d: %s", self.generation, dict(member))

    def _fall_back(self, why: str) -> bool:
        """Go over to sync.fallback for good; False when there is none, or it is in use already."""
        if self.config.sync.fallback == "none" or self.fell_back:
            return False
        log.warning("%s; going on over sync.fallback = %s", why, self.config.sync.fallback)
        self.fell_back = True
        return True


Call = Future[Any]


class EngineLost(Exception):
    """Says that an engine was lost during a transfer, and that all other members have left the group."""


@dataclass(slots=True)
class _Transfer:
    """Holds the calls of a transfer, and what has become of its members."""

    rollout: EngineHandle
    actor: Sequence[Call]
    engines: Mapping[Call, int]
    lost: dict[int, BaseException] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    failed: bool = False  # a call failed, and no engine is known to be lost
    aborts: int = 0
    broken_at: float = 0.0  # time when the first call failed, or reported that the transfer was cut off

    def take(self, call: Call) -> bool:
        """Note the end of a call; False: it failed for a reason of its own, and ends the run."""
        error = call.exception()
        if error is None:
            found = call.result()
            broken = isinstance(found, SyncReport) and bool(found.broken)
        else:
            broken, engine = True, self.engines.get(call)
            if engine is not None and self.rollout.goes_on_without(engine, error):
                self.lost[engine] = error
            elif not isinstance(error, RemoteError) or error.user_error:
                return False
            else:
                self.failed = True
        if broken and not self.broken_at:
            self.broken_at = time.monotonic()
        return True


def settle_update(rollout: EngineHandle, actor: Sequence[Call], engines: Mapping[Call, int]) -> None:
    """Wait until the calls of an update are answered, or one has failed for another reason than an engine's end.

    Engines that still hang after every other member has left a broken update are given up. Raises EngineLost.
    """
    _settle(_Transfer(rollout, actor, engines), _give_up_late)


def _settle(transfer: _Transfer, urge: Callable[[_Transfer, float], None]) -> None:
    """Wait. Once a call has failed or broken off, `urge(transfer, seconds since then)` hurries the others."""
    pending = {*transfer.actor, *transfer.engines}
    while pending:
        done, pending = wait(pending, timeouts.POLL_S if transfer.broken_at else None, FIRST_COMPLETED)
        if not all(transfer.take(call) for call in done):
            return
        if transfer.broken_at:
            waited = time.monotonic() - transfer.broken_at
            if transfer.failed and not transfer.lost and waited > timeouts.TRANSFER_DEATH_S:
                return
            urge(transfer, waited)
    if transfer.lost:
        raise EngineLost("; ".join(str(error) for error in transfer.lost.values()))


def _give_up_late(transfer: _Transfer, waited: float) -> None:
    if waited < timeouts.TRANSFER_SLOW_S or not all(call.done() for call in transfer.actor):
        return
    for call, engine in transfer.engines.items():
        if not call.done() and engine not in transfer.given_up:
            transfer.given_up.add(engine)
            transfer.rollout.give_up(engine, f"it hangs in a weight update that broke off {waited:.0f} s ago")


def _end_forming(leader: RoleHandle[ActorCalls], transfer: _Transfer, waited: float) -> None:
    """Abort the forming of the group once an engine is lost; repeatedly, as the leader may not have begun it."""
    if transfer.lost and waited > transfer.aborts * timeouts.TRANSFER_ABORT_S:
        transfer.aborts += 1
        leader.call(LEADER, ActorCalls.sync_abort)

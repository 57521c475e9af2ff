"""The engines of a run: when each takes part, and how the actor's weights get into all of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.calls import (
    ActorCalls,
    EngineCalls,
    ListenRequest,
    StartRequest,
    SyncGroupRequest,
    SyncUpdateRequest,
)
from slurm_rlhf.control.server import EngineHandle, RoleHandle, gather
from slurm_rlhf.controller.supervisor import Supervisor
from slurm_rlhf.errors import CallTimeout, RemoteError, SyncError
from slurm_rlhf.records import ParameterSpec, StoreAddress, SyncConnection

log = logging.getLogger(__name__)

POLL_S = 0.1
LEADER = 0  # the actor rank that leads an update; it is rank 0 of the sync group


class EnginePool:
    """Starts every engine as soon as all of its ranks are there, and keeps `EngineHandle.ready` up to date.

    With `all_at_once` the run waits for all of them, so that which engine gets which prompt does not depend on time.
    Otherwise it begins with the first one, and the others join when they are ready, in the middle of a batch, too; one
    that never comes is told of with `note`, and done without.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        handle: EngineHandle,
        weight_sync: WeightSync,
        timeout_s: float,
        all_at_once: bool,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._supervisor = supervisor
        self._handle = handle
        self._weight_sync = weight_sync
        self._timeout_s = timeout_s
        self._all_at_once = all_at_once
        self._note = note
        self._started: list[Future[None]] = [Future() for _ in range(handle.world)]
        self._connected: list[int] = []  # engines in the present sync group
        self._parameters: list[ParameterSpec] = []
        handle.ready = []

    def begin(self) -> None:
        """Start the engines, and return at once. An engine that fails to start ends the run."""
        threading.Thread(target=self._start_each, name="engines", daemon=True).start()

    def wait(self, parameters: list[ParameterSpec]) -> list[int]:
        """Wait until the first engine has started, or all; answer which have.

        `parameters`: what the actor is going to send.
        """
        self._parameters = parameters
        if self._all_at_once:
            for started in self._started:
                started.result()
        else:
            wait(self._started, return_when=FIRST_COMPLETED)
        return self._arrived()

    @property
    def whole(self) -> bool:
        """Tell whether every engine has started."""
        return all(started.done() and started.exception() is None for started in self._started)

    def renew(self, handle: EngineHandle, weight_sync: WeightSync) -> None:
        """Go on with the engines that there are, called through `handle`, and the weights of an actor that is new."""
        handle.ready = list(range(handle.world))
        self._handle, self._weight_sync, self._connected = handle, weight_sync, []

    @property
    def coming(self) -> bool:
        """Tell whether some engines are not ready yet."""
        return len(self._handle.ready) < self._handle.world

    def admit(self, version: int) -> list[int]:
        """Give engines that have started meanwhile the actor's weights, policy `version`; answer which they are.

        The others are not disturbed: they may be generating.
        """
        new = [engine for engine in self._arrived() if engine not in self._handle.ready] if self.coming else []
        if new:
            self._join(new)
            self._weight_sync.update(version)
            self._set_ready(sorted([*self._handle.ready, *new]), version)
        return new

    def update(self, version: int) -> dict[str, float]:
        """Give every engine that has started the actor's weights, as `WeightSync.update` does."""
        arrived = self._arrived() if self.coming else self._handle.ready
        if arrived != self._connected:
            self._join(arrived)
        metrics = self._weight_sync.update(version)
        self._set_ready(arrived, version)
        return metrics

    def _set_ready(self, engines: list[int], version: int) -> None:
        for engine in engines:
            if engine not in self._handle.ready:
                log.info("engine %d takes part from policy version %d on", engine, version)
        self._handle.ready = engines

    def _join(self, engines: list[int]) -> None:
        self._weight_sync.connect(self._parameters, engines)
        self._connected = engines

    def _arrived(self) -> list[int]:
        """List the engines that have started. Raises what kept one from it."""
        done = [engine for engine, started in enumerate(self._started) if started.done()]
        for engine in done:
            self._started[engine].result()
        return done

    def _start_each(self) -> None:
        absent = set(range(self._handle.world))
        end, late = time.monotonic() + self._timeout_s, None
        while absent and not self._supervisor.leaving:
            here = self._supervisor.here(self._handle.role)
            for engine in sorted(absent):
                if here.issuperset(self._ranks(engine)):
                    absent.discard(engine)
                    call = self._handle.call(engine, EngineCalls.start, StartRequest(0))
                    call.add_done_callback(partial(self._finish, engine))
            failure = self._supervisor.failure
            if absent and late is None and time.monotonic() > end:
                late = self._late(absent, here)
                if self._all_at_once or len(absent) == self._handle.world:
                    failure = failure or late
                else:
                    self._note(f"warning: {late}. The run goes on without them, and takes them in when they come")
            if absent and failure is not None:
                for engine in absent:
                    self._started[engine].set_exception(failure)
                self._supervisor.fail(failure)
                return
            time.sleep(POLL_S)

    def _ranks(self, engine: int) -> range:
        return range(engine * self._handle.width, (engine + 1) * self._handle.width)

    def _late(self, absent: set[int], here: set[int]) -> CallTimeout:
        engine = min(absent)
        missing = ", ".join(str(rank) for rank in self._ranks(engine) if rank not in here)
        return CallTimeout(
            f"engine {engine}: {self._handle.role} rank {missing} did not say hello within {self._timeout_s:g} s "
            f"(timeout.connect); engines without all of their ranks: {len(absent)}. Their log files say why"
        )

    def _finish(self, engine: int, call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            self._started[engine].set_result(None)
            return
        self._started[engine].set_exception(error)
        if isinstance(error, Exception):
            self._supervisor.fail(error)


@dataclass(slots=True)
class WeightSync:
    """Leads weight updates: actor and engine ranks form a group of their own, outside those of their roles."""

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

    def renewed(self, actor: RoleHandle[ActorCalls], rollout: EngineHandle, host: str) -> WeightSync:
        """Lead the updates of an actor that was started again: its store and its groups are new ones."""
        sync = WeightSync(self.config, actor, rollout, host)
        sync.generation, sync._fallback = self.generation, self._fallback
        return sync

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
        if self.connection is not None and self.connection.mbits and leader.seconds > 0:
            # Every node of engines receives all bytes.
            metrics["perf/sync_link_share"] = 8e-6 * leader.nbytes / leader.seconds / self.connection.mbits
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

"""Starts the engines of a run, and lets each take part once it has the weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurm_rlhf.errors import CallTimeout
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.records import ParameterSpec
from slurm_rlhf.weights.lead import EngineLost, WeightSync
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import (
    EngineCalls,
)
from slurm_rlhf.wire.handles import EngineHandle

log = logging.getLogger(__name__)

_STARTED_S = 0.02


@dataclass(slots=True)
class _EngineStart:
    """Describes one start of an engine: its number, which `EngineRecovery` counts, and whether it is done."""

    life: int
    done: bool = False


class EnginePool:
    """Starts every engine as soon as all of its ranks are there, and keeps `EngineHandle.ready` up to date.

    With `all_at_once` the run waits for all of them, so that which engine gets which prompt does not depend on time.
    Otherwise it begins with the first one, and the others join when they are ready, in the middle of a batch, too; one
    that never starts is reported with `note`, and the run goes on without it. An engine that was lost and started again
    joins in the same way.
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
        self._recovery = supervisor.recovery
        self._handle = handle
        self._weight_sync = weight_sync
        self._timeout_s = timeout_s
        self._all_at_once = all_at_once
        self._note = note
        self._starts: dict[int, _EngineStart] = {}
        self._failure: BaseException | None = None  # error that kept an engine from starting
        self._connected: list[tuple[int, int]] = []  # (engine, life) in the present sync group
        self._parameters: list[ParameterSpec] = []
        self._version = 0  # version of the actor's policy
        self._closed = False
        handle.ready = []

    def begin(self) -> None:
        """Start the engines, and return at once. An engine that fails to start ends the run."""
        threading.Thread(target=self._start_each, name="engines", daemon=True).start()

    def wait(self, parameters: list[ParameterSpec]) -> list[int]:
        """Wait until the first engine has started, or all; return those that have.

        `parameters`: those that the actor is going to send. Raises the error that kept an engine from starting.
        """
        self._parameters = parameters
        while True:
            if self._failure is not None:
                raise self._failure
            arrived = self._arrived()
            if len(arrived) >= (self._expected() if self._all_at_once else 1):
                return arrived
            time.sleep(_STARTED_S)

    def _expected(self) -> int:
        return self._recovery.left if self._recovery else self._handle.world

    def close(self) -> None:
        """Start no further engine, because another pool takes over."""
        self._closed = True

    @property
    def arrived(self) -> list[int]:
        """List the engines that have started, and were not lost since."""
        return self._arrived()

    @property
    def begun(self) -> list[int]:
        """List the engines that were asked to start, and have not answered."""
        return [engine for engine, start in self._starts.items() if not start.done and start.life == self._life(engine)]

    @property
    def started(self) -> dict[int, _EngineStart]:
        """Return the starts that engines have answered."""
        return {engine: start for engine, start in self._starts.items() if start.done}

    def take_over(self, before: EnginePool) -> None:
        """Take the engines over that have started in the pool before, which is closed."""
        self._starts = before.started

    @property
    def coming(self) -> bool:
        """Tell whether some engines are not ready yet."""
        return len(self._handle.ready) < self._expected()

    def admit(self, version: int) -> list[int]:
        """Give engines that have started meanwhile the actor's weights, policy `version`; answer which they are.

        The others are not disturbed: they may be generating.
        """
        new = [engine for engine in self._arrived() if engine not in self._handle.ready] if self.coming else []
        if not new:
            return []
        try:
            self._join(new)
            self._weight_sync.update(version)
        except EngineLost:
            return []
        self._set_ready(sorted([*self._handle.ready, *new]), version)
        return new

    def rescue(self) -> list[int]:
        """Admit engines that have started again, if none is left; return which. Raises the error that ended the run."""
        if self._handle.ready:
            return []
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        return self.admit(self._version)

    def update(self, version: int) -> dict[str, float]:
        """Give every engine that has started the actor's weights, as `WeightSync.update` does.

        The run goes on without engines that are lost meanwhile. If none is left, `rescue` waits for one.
        """
        self._version = version
        while arrived := self._arrived():
            try:
                if self._lives(arrived) != self._connected:
                    self._join(arrived)
                metrics = self._weight_sync.update(version)
            except EngineLost as lost:
                log.warning("%s; the update to policy version %d goes on without", lost, version)
                continue
            self._set_ready(arrived, version)
            return metrics
        return {}

    def _set_ready(self, engines: list[int], version: int) -> None:
        for engine in engines:
            if engine not in self._handle.ready:
                log.info("engine %d takes part from policy version %d on", engine, version)
                if self._recovery:
                    self._recovery.joined(engine, version)
        self._handle.ready = [engine for engine in engines if self._life(engine) is not None]

    def _join(self, engines: list[int]) -> None:
        self._connected = []
        lives = self._lives(engines)
        self._weight_sync.connect(self._parameters, engines)
        self._connected = lives

    def _life(self, engine: int) -> int | None:
        """Return which start of an engine counts; None: none does."""
        return self._recovery.life(engine) if self._recovery else 0

    def _lives(self, engines: list[int]) -> list[tuple[int, int]]:
        return [(engine, self._starts[engine].life) for engine in engines]

    def _arrived(self) -> list[int]:
        """List the engines that have started."""
        starts = sorted(self._starts.items())
        return [engine for engine, start in starts if start.done and start.life == self._life(engine)]

    def _absent(self) -> list[int]:
        """List the engines that were not asked to start since their processes started."""
        lives = ((engine, self._life(engine)) for engine in range(self._handle.world))
        return [e for e, life in lives if life is not None and (e not in self._starts or self._starts[e].life != life)]

    def _start_each(self) -> None:
        end, late = time.monotonic() + self._timeout_s, False
        while not self._supervisor.leaving and self._failure is None and not self._closed:
            here = self._supervisor.here(self._handle.role) if (absent := self._absent()) else set()
            for engine in absent:
                if here.issuperset(self._ranks(engine)):
                    self._start(engine)
            self._failure = self._supervisor.failure
            never = [engine for engine in self._absent() if engine not in self._starts]
            if never and not late and time.monotonic() > end:
                late, what = True, self._late(never, here)
                if self._all_at_once or len(never) == self._handle.world:
                    self._failure = self._failure or what
                else:
                    self._note(f"warning: {what}. The run goes on without them, and takes them in when they come")
            if never and isinstance(self._failure, Exception) and not self._closed:
                self._supervisor.fail(self._failure)
            time.sleep(timeouts.POLL_S)

    def _start(self, engine: int) -> None:
        life = self._life(engine)
        if life is None:
            return
        start = self._starts[engine] = _EngineStart(life)
        call = self._handle.call(engine, EngineCalls.start, 0)
        call.add_done_callback(partial(self._finish, engine, start))

    def _ranks(self, engine: int) -> range:
        return range(engine * self._handle.width, (engine + 1) * self._handle.width)

    def _late(self, absent: list[int], here: set[int]) -> CallTimeout:
        engine = min(absent)
        missing = ", ".join(str(rank) for rank in self._ranks(engine) if rank not in here)
        return CallTimeout(
            f"engine {engine}: {self._handle.role} rank {missing} did not say hello within {self._timeout_s:g} s "
            f"(timeout.connect); engines without all of their ranks: {len(absent)}. Their log files say why"
        )

    def _finish(self, engine: int, start: _EngineStart, call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            log.info("engine %d has started", engine)
            start.done = True
            if self._recovery:
                self._recovery.arm()
            return
        if self._closed or self._handle.goes_on_without(engine, error):
            return  # the recovery starts it again
        if start.life and self._recovery and self._recovery.lost(engine, f"it did not start: {error}", start.life):
            return
        self._failure = error
        if isinstance(error, Exception):
            self._supervisor.fail(error)

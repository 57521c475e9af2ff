"""The engines of a run: when each takes part, and what each did in a step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

from slurm_rlhf.control.calls import EngineCalls, StartRequest
from slurm_rlhf.control.handles import EngineHandle
from slurm_rlhf.controller.supervisor import Supervisor
from slurm_rlhf.controller.weight_updates import WeightSync
from slurm_rlhf.errors import CallTimeout
from slurm_rlhf.observe.engine_load import STEPS, Stragglers
from slurm_rlhf.records import EngineLoad, ParameterSpec

log = logging.getLogger(__name__)

POLL_S = 0.1


class EnginePool:
    """Starts every engine as soon as all of its ranks are there, and keeps `EngineHandle.ready` up to date.

    With `all_at_once` the run waits for all of them, so that which engine gets which prompt does not depend on time.
    Otherwise it begins with the first one, and the others join when they are ready, in the middle of a batch, too.
    """

    def __init__(
        self, supervisor: Supervisor, handle: EngineHandle, weight_sync: WeightSync, timeout_s: float, all_at_once: bool
    ) -> None:
        self._supervisor = supervisor
        self._handle = handle
        self._weight_sync = weight_sync
        self._timeout_s = timeout_s
        self._all_at_once = all_at_once
        self._started: list[Future[None]] = [Future() for _ in range(handle.world)]
        self._connected: list[int] = []  # engines in the present sync group
        self._parameters: list[ParameterSpec] = []
        handle.ready = []

    def begin(self) -> None:
        """Start the engines, and return at once. An engine that cannot start ends the run."""
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
        end = time.monotonic() + self._timeout_s
        while absent:
            here = self._supervisor.here(self._handle.role)
            for engine in sorted(absent):
                if here.issuperset(self._ranks(engine)):
                    absent.discard(engine)
                    call = self._handle.call(engine, EngineCalls.start, StartRequest(0))
                    call.add_done_callback(partial(self._finish, engine))
            if absent and (failure := self._supervisor.failure or self._late(absent, here, end)):
                for engine in absent:
                    self._started[engine].set_exception(failure)
                self._supervisor.fail(failure)
                return
            time.sleep(POLL_S)

    def _ranks(self, engine: int) -> range:
        return range(engine * self._handle.width, (engine + 1) * self._handle.width)

    def _late(self, absent: set[int], here: set[int], end: float) -> CallTimeout | None:
        if time.monotonic() < end:
            return None
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


class EngineMetrics:
    """Says what the engines did in a step: as metrics, and in words where one is far below its peers."""

    def __init__(self, nodes: list[str], note: Callable[[str], None]) -> None:
        """`nodes[engine]`: where an engine runs; `note` tells the user."""
        self._nodes = nodes
        self._note = note
        self._stragglers = Stragglers()

    def step(self, number: int, loads: dict[int, EngineLoad]) -> dict[str, float]:
        """Answer metrics `perf/engine/<index>/<name>`; `loads` are of this step's rollout."""
        rates = {engine: load.tokens_per_s for engine, load in loads.items()}
        fresh, back = self._stragglers.step(rates)
        for engine, peers in fresh.items():
            node = self._nodes[engine]
            self._note(
                f"step {number}: engine {engine} on {node} is far below its peers for {STEPS} steps: "
                f"{rates[engine]:.0f} tokens/s, the others' median is {peers:.0f} (perf/engine/{engine}/tokens_per_s). "
                f"Look at what else runs on {node}, and at where the engine's GPUs are: slurm-rlhf plan"
            )
        for engine in back:
            self._note(
                f"step {number}: engine {engine} on {self._nodes[engine]} is back among its peers, "
                f"{rates[engine]:.0f} tokens/s"
            )
        return {
            f"perf/engine/{engine}/{name}": value
            for engine, load in loads.items()
            for name, value in load.metrics().items()
        }

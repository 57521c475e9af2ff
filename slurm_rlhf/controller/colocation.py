"""Accelerators that engines and trainers share: one of them computes at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slurm_rlhf.cluster.stop import StopRequested
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import EngineHandle, RoleHandle, gather
from slurm_rlhf.controller.dispatch import Generation
from slurm_rlhf.controller.engine_pool import Engines
from slurm_rlhf.controller.supervisor import Fleet
from slurm_rlhf.controller.weight_updates import WeightSync
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.records import KV_CACHE, WEIGHTS, Prompt, Sampling, Trajectory

log = logging.getLogger(__name__)


class TurnTakingEngines(Engines):
    """Engines that sleep unless they generate (train.colocate_all).

    They start before any trainer has touched the accelerators, because vLLM measures the memory that is free then.
    Asleep they have no weights: every turn begins with an update, into engines that have room for weights only, and
    the KV cache comes last.
    """

    def __init__(self, fleet: Fleet, handle: EngineHandle, weights: WeightSync, config: Config, phases: Phases) -> None:
        super().__init__(fleet, handle, weights, config.timeout.connect, all_at_once=True)
        self._phases = phases
        self._parks = config.ds.enable_sleep
        self._metrics: dict[str, float] = {}

    def begin(self) -> None:
        """Returns when all engines have started and are asleep. Raises what kept one from it."""
        super().begin()
        started = self.wait([])
        log.info("engines %s have started, before any trainer", started)
        self._sleep()

    def update(self, version: int) -> dict[str, float]:
        """Metrics of the last turn. The weights of `version` go to the engines when theirs begins."""
        return self._metrics

    @contextmanager
    def turn(self, version: int) -> Iterator[None]:
        """Within it the engines have policy `version` and the accelerators; after it the trainers have them.

        A stop may come at any time: what the engines had begun is dropped, so that the trainers can save.
        """
        try:
            self._wake(version)
            yield
            self._hand_back()
        except StopRequested:
            self._hand_back()  # again, if that is what the stop broke into
            raise

    def _wake(self, version: int) -> None:
        with self._phases("sync"):
            began = time.monotonic()
            self._park("sleep")
            self._all("wake_up", part=WEIGHTS)
            woken = time.monotonic()
            metrics = super().update(version)
            moved = time.monotonic()
            self._all("wake_up", part=KV_CACHE)
            now = time.monotonic()
        self._metrics = metrics | {"time/wake_up": woken - began + now - moved}
        log.info(
            "engines are awake with policy version %d, by weight transfer group %d", version, self._weights.generation
        )

    def _hand_back(self) -> None:
        began = time.monotonic()
        freed = self._sleep()
        self._park("wake_up")
        self._metrics |= {"time/sleep": time.monotonic() - began, "perf/sleep_freed_bytes": float(freed)}

    def _sleep(self) -> int:
        freed = min(self._all("sleep"))
        what = f"at least {freed / 2**30:.1f} GiB freed on each GPU" if freed else "vLLM frees no memory on CPUs"
        log.info("engines sleep: %s", what)
        return freed

    def _park(self, method: str) -> None:
        if self._parks:
            roles: list[RoleHandle] = [handle for role, handle in self._fleet.roles.items() if ROLES[role].sleeps]
            gather([call for role in roles for call in role.start_all(method)])

    def _all(self, method: str, **arguments: Any) -> list[Any]:
        return self._handle.call_all(method, **arguments)


class TurnTakingGeneration(Generation):
    """Each batch is one turn of the engines."""

    def run(self, prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        """See `Generation.run`."""
        assert isinstance(self.engines, TurnTakingEngines)
        with self.engines.turn(version):
            return super().run(prompts, sampling, version)

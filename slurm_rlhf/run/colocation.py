"""Lets engines and trainers take turns on accelerators that they share (train.colocate_all)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slurm_rlhf.cluster.stop import StopRequested
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.records import KV_CACHE, WEIGHTS
from slurm_rlhf.wire.calls import EngineCalls, TrainerCalls, WakeUpRequest
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle, gather

log = logging.getLogger(__name__)


class Colocation:
    """Gives the accelerators from the trainers to the engines, and back.

    Engines start before any trainer has touched the accelerators, because they measure the memory that is free then.
    They sleep whenever they do not generate, and have no weights meanwhile. When they wake up they first get room for
    weights, then the weights, and last the KV cache.
    """

    def __init__(self, roles: Mapping[str, RoleHandle[Any]], engines: EngineHandle, offload: bool) -> None:
        """`offload`: actor and critic have optimizer states to move out of the engines' way (ds.enable_sleep)."""
        self._roles = roles
        self._engines = engines
        self._offload = offload
        self._times: dict[str, float] = {}

    @contextmanager
    def turn(self) -> Iterator[dict[str, float]]:
        """Leave the accelerators to the engines; afterwards the trainers have them, and the yielded metrics are filled.

        A stop may come at any time: unfinished work of the engines is dropped, so that the trainers can save.
        """
        spent = self._times = {}
        try:
            yield spent
            self._hand_back()
        except StopRequested:
            self._hand_back()  # again, if the stop came in the middle of it
            raise

    @contextmanager
    def waking(self, version: int) -> Iterator[None]:
        """Wake the engines up for an update to policy `version`: room for weights before it, the KV cache after it."""
        began = time.monotonic()
        self._tell_trainers(TrainerCalls.sleep)
        self._engines.call_all(EngineCalls.wake_up, WakeUpRequest(WEIGHTS))
        woken = time.monotonic()
        yield
        moved = time.monotonic()
        self._engines.call_all(EngineCalls.wake_up, WakeUpRequest(KV_CACHE))
        self._times["time/wake_up"] = woken - began + time.monotonic() - moved
        log.info("engines are awake with policy version %d", version)

    def put_engines_to_sleep(self) -> int:
        """Free the engines' memory; return the bytes that are freed on every accelerator."""
        freed = min(self._engines.call_all(EngineCalls.sleep))
        what = f"at least {freed / 2**30:.1f} GiB freed on each GPU" if freed else "vLLM frees no memory on CPUs"
        log.info("engines sleep: %s", what)
        return freed

    def _hand_back(self) -> None:
        began = time.monotonic()
        freed = self.put_engines_to_sleep()
        self._tell_trainers(TrainerCalls.wake_up)
        self._times |= {"time/sleep": time.monotonic() - began, "perf/sleep_freed_bytes": float(freed)}

    def _tell_trainers(self, method: Callable[[TrainerCalls], None]) -> None:
        if self._offload:
            handles = [handle for role, handle in self._roles.items() if ROLES[role].kind == "trained"]
            gather([call for handle in handles for call in handle.start_all(method)])

"""Lets engines take part once they have the weights."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from slurm_rlhf.groups.engines import Engines
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.records import ParameterSpec
from slurm_rlhf.weights.lead import EngineLost, WeightSync
from slurm_rlhf.wire.handles import EngineHandle

log = logging.getLogger(__name__)

_STARTED_S = 0.02


@dataclass(slots=True)
class EnginePool:
    """Gives engines that have started the actor's weights: from then on they are in `EngineHandle.ready`.

    With `all_at_once` the run waits for all of them, so that which engine gets which prompt does not depend on time.
    Otherwise it begins with the first one, and the others join when they are ready, in the middle of a batch, too. An
    engine that was lost and started again joins in the same way.
    """

    supervisor: Supervisor
    engines: Engines
    handle: EngineHandle
    weight_sync: WeightSync
    all_at_once: bool
    _connected: dict[int, int] = field(default_factory=dict, init=False)  # engine -> life, in the present sync group
    _parameters: list[ParameterSpec] = field(default_factory=list, init=False)
    _version: int = field(default=0, init=False)  # version of the actor's policy

    def wait(self, parameters: list[ParameterSpec]) -> list[int]:
        """Wait until the first engine has started, or all; return those that have.

        `parameters`: those that the actor is going to send. Raises the error that kept an engine from starting.
        """
        self._parameters = parameters
        while True:
            if self.supervisor.failure is not None:
                raise self.supervisor.failure
            if len(up := self.engines.up) >= (self.engines.left if self.all_at_once else 1):
                return [*up]
            time.sleep(_STARTED_S)

    @property
    def coming(self) -> bool:
        """Tell whether some engines are not ready yet."""
        return len(self.handle.ready) < self.engines.left

    def admit(self, version: int) -> list[int]:
        """Give engines that have started meanwhile the actor's weights, policy `version`; return which they are.

        The others are not disturbed: they may be generating.
        """
        up, ready = self.engines.up if self.coming else {}, [*self.handle.ready]
        new = {engine: life for engine, life in up.items() if engine not in ready}
        if not new:
            return []
        try:
            self._join(new)
            self.weight_sync.update(version)
        except EngineLost:
            return []
        self.engines.take_part([*self.handle.ready, *new], version)
        return [*new]

    def rescue(self) -> list[int]:
        """Admit engines that have started again, if none is left; return which. Raises the error that ended the run."""
        if self.handle.ready:
            return []
        if self.supervisor.failure is not None:
            raise self.supervisor.failure
        return self.admit(self._version)

    def update(self, version: int) -> dict[str, float]:
        """Give every engine that has started the actor's weights, as `WeightSync.update` does.

        The run goes on without engines that are lost meanwhile. If none is left, `rescue` waits for one.
        """
        self._version = version
        while up := self.engines.up:
            try:
                if up != self._connected:
                    self._join(up)
                metrics = self.weight_sync.update(version)
            except EngineLost as lost:
                log.warning("%s; the update to policy version %d goes on without", lost, version)
                continue
            self.engines.take_part(up, version)
            return metrics
        return {}

    def _join(self, engines: dict[int, int]) -> None:
        self._connected = {}
        self.weight_sync.connect(self._parameters, [*engines])
        self._connected = engines

"""Decides after which steps a save is due, waits for one that is being written, and finds the best checkpoint."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from slurm_rlhf.checkpoint.interval import Failures, best_interval, in_steps, span
from slurm_rlhf.polling import in_thread
from slurm_rlhf.wire.handles import RoleHandle

FIRST = 2
"""Step after which `auto` saves first, to measure a save; the first step is longer by its warm-up."""
REMEMBERED = 20
"""Number of steps and of saves whose medians count."""
NEWS = 1.5
"""Factor between the interval and the one last reported at which the user gets another report."""


@dataclass(slots=True)
class SaveCadence:
    """Tells when a checkpoint is due. `begin` comes before each step, `due` after it, `saved` after each save."""

    every: int | Literal["auto"]  # ckpt.save_steps
    failures: Failures
    note: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    last: int = 0  # step of the newest checkpoint
    _saves: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)  # seconds
    _since: float | None = field(default=None, init=False)  # time when the present step began
    _reported: int = field(default=0, init=False)

    def begin(self) -> None:
        """Note that the next step begins."""
        self._since = self.clock()

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is due after `step`, which has just ended."""
        if self._since is not None:
            self._steps.append(self.clock() - self._since)
        if self.every != "auto":
            return self.every > 0 and step % self.every == 0
        if not self._saves:
            return step - self.last >= FIRST
        return step - self.last >= self.interval()

    def begun(self, step: int) -> None:
        """Note that a checkpoint of `step` is being made: the next one is due an interval later."""
        self.last = step

    def saved(self, cost_s: float, written_s: float) -> None:
        """Note that a save has kept the run from its steps for `cost_s` and was on disk after `written_s`."""
        self._saves.append((cost_s, written_s))
        if self.every != "auto" or not self._steps:
            return
        steps = self.interval()
        if not self._reported or not self._reported / NEWS <= steps <= self._reported * NEWS:
            self._reported = steps
            self.note(f"ckpt.save_steps = auto: {self.words()}")

    def interval(self) -> int:
        """Return the number of steps between saves that is best by the measurements so far."""
        return in_steps(best_interval(*self._costs(), self.failures.mtbf_s), self._step_s())

    def words(self) -> str:
        """Describe the interval, and the reasons for it."""
        steps, step_s, (cost_s, written_s) = self.interval(), self._step_s(), self._costs()
        return (
            f"a checkpoint every {steps} steps ({span(steps * step_s)}): a step takes {span(step_s)}, a save keeps "
            f"the run waiting for {span(cost_s)} and is on disk after {span(written_s)}; {self.failures.words()}"
        )

    def _costs(self) -> tuple[float, float]:
        costs, writes = zip(*self._saves, strict=True)
        return statistics.median(costs), statistics.median(writes)

    def _step_s(self) -> float:
        return statistics.median(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements, so that a resume need not repeat them."""
        return {"saves": [list(each) for each in self._saves], "steps": list(self._steps)}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go on from `state_dict`, at the checkpoint of `step`."""
        self.last = step
        self._saves.extend((cost_s, written_s) for cost_s, written_s in state.get("saves", ()))
        self._steps.extend(state.get("steps", ()))


@dataclass(frozen=True, slots=True)
class Best:
    """Says which step was the best so far; more is better, and the first of equal ones."""

    metric: str
    value: float
    step: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def better(best: Best | None, metric: str, metrics: Mapping[str, float], step: int) -> Best | None:
    """Return the best step once `step` was evaluated with `metrics`; None if `metric` is empty."""
    value = metrics.get(metric, math.nan)
    if not metric or not math.isfinite(value) or (best is not None and value <= best.value):
        return best
    return Best(metric, float(value), step)


def resumed(state: Mapping[str, Any] | None, metric: str, present: bool) -> tuple[Best | None, str]:
    """Read the best step of a checkpoint's state, or say why it is none any more; `present`: its checkpoint exists."""
    if not metric or not state:
        return None, ""
    best = Best(**state)
    if best.metric != metric:
        return None, (
            f"ckpt.best_metric was {best.metric} before, and is {metric} now: step {best.step} is no longer kept as "
            "the best, and the best is chosen anew from here on"
        )
    if not present:
        return None, (
            f"the best checkpoint so far, of step {best.step} ({metric} {best.value:.4f}), is not in this run "
            "directory any more: the best is chosen anew from here on"
        )
    return best, ""


@dataclass(slots=True)
class PendingSave:
    """Waits in a thread of its own until a checkpoint of `step` is whole."""

    step: int
    started: float  # time.monotonic()
    cost_s: float  # seconds for which the run waited
    _seconds: Future[float] = field(default_factory=Future, init=False)

    def begin(self, complete: Callable[[], None]) -> None:
        """Run `complete`, after which the checkpoint is whole, while the run goes on."""

        def timed() -> float:
            complete()
            return time.monotonic() - self.started

        self._seconds = in_thread(timed, "checkpoint")

    def complete(self, complete: Callable[[], None]) -> None:
        """Run `complete` now, while the run waits. Raises its error."""
        complete()
        self.cost_s = time.monotonic() - self.started
        self._seconds.set_result(self.cost_s)

    def done(self) -> bool:
        """Tell whether `result` need not wait."""
        return self._seconds.done()

    def wait_for(self, timeout_s: float | None) -> bool:
        """Wait until it is written or has failed, at most `timeout_s` seconds; return whether it is over."""
        try:
            self._seconds.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def result(self) -> float:
        """Wait, and return the seconds from its beginning until it was whole. Raises its error."""
        return self._seconds.result()


def written(roles: Iterable[RoleHandle[Any]]) -> list[Future[None]]:
    """Return futures that resolve once each rank of `roles` has written what `save` has copied."""
    return [role.written(rank) for role in roles for rank in range(role.world)]

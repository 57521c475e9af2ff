"""The saves of a run: after which steps one is due, one that is being written, and which checkpoint is the best."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from slurm_rlhf.checkpoint.interval import Failures, best_interval, in_steps, span
from slurm_rlhf.wire.handles import RoleHandle

FIRST = 2
"""The step after which `auto` saves first, to see what it takes; the first step has the warm-up in it."""
REMEMBERED = 20
NEWS = 1.5
"""The user is told of an interval that is so many times longer or shorter than the one told before."""


@dataclass(slots=True)
class SaveCadence:
    """Tells when a checkpoint is due. `step_done` comes after each step, `saved` after each save."""

    every: int | Literal["auto"]  # ckpt.save_steps
    failures: Failures
    note: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    last: int = 0  # step of the newest checkpoint
    _saves: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)  # seconds of each
    _since: float | None = field(default=None, init=False)  # when the step under way began
    _told: int = field(default=0, init=False)

    def begin(self) -> None:
        """Note that the next step begins."""
        self._since = self.clock()

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is due after `step`, which is done just now."""
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
        if not self._told or not self._told / NEWS <= steps <= self._told * NEWS:
            self._told = steps
            self.note(f"ckpt.save_steps = auto: {self.words()}")

    def interval(self) -> int:
        """Return the steps from save to save that are best by what was measured so far."""
        return in_steps(best_interval(*self._costs(), self.failures.mtbf_s), self._step_s())

    def words(self) -> str:
        """Say what the interval is, and why."""
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
        """Return what a resume goes on with, so that it need not measure anew."""
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
    """Return what is the best once `step` was evaluated with `metrics`; an empty `metric`: nothing is."""
    value = metrics.get(metric, math.nan)
    if not metric or not math.isfinite(value) or (best is not None and value <= best.value):
        return best
    return Best(metric, float(value), step)


def resumed(state: Mapping[str, Any] | None, metric: str, present: bool) -> tuple[Best | None, str]:
    """Read the best of a checkpoint's state, and say why there is none any more; `present`: its checkpoint is there."""
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
    cost_s: float  # for which the run waited
    _seconds: Future[float] = field(default_factory=Future, init=False)

    def begin(self, complete: Callable[[], None]) -> None:
        """Run `complete`, after which the checkpoint is whole, beside the run."""
        threading.Thread(target=self._run, args=(complete,), name="checkpoint", daemon=True).start()

    def complete(self, complete: Callable[[], None]) -> None:
        """Run `complete` now; the run waits for it. Raises what it raises."""
        complete()
        self.cost_s = time.monotonic() - self.started
        self._seconds.set_result(self.cost_s)

    def _run(self, complete: Callable[[], None]) -> None:
        try:
            complete()
        except BaseException as error:  # `result` raises it in the main thread
            self._seconds.set_exception(error)
        else:
            self._seconds.set_result(time.monotonic() - self.started)

    def done(self) -> bool:
        """Tell whether `result` need not wait."""
        return self._seconds.done()

    def wait_for(self, timeout_s: float | None) -> bool:
        """Wait until it is written or has failed, no longer than so many seconds if any; tell whether it is over."""
        try:
            self._seconds.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def result(self) -> float:
        """Wait, and return the seconds from its beginning until it was whole. Raises what went wrong."""
        return self._seconds.result()


def written(roles: Iterable[RoleHandle[Any]]) -> list[Future[None]]:
    """Return what is done once each rank of `roles` has written what `save_async` has begun."""
    return [role.written(rank) for role in roles for rank in range(role.world)]

"""After which steps a run saves: every so many, or with ckpt.save_steps = auto as often as is best."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from slurm_rlhf.checkpoint.interval import Failures, best_interval, in_steps, span

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

"""Holds the state of a run, which is the conductor's part of a checkpoint, and saves and loads whole checkpoints."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slurm_rlhf.algorithms.registry import changed_plugins, load_plugins
from slurm_rlhf.algorithms.reward_shaping import RunningScale
from slurm_rlhf.checkpoint.directory import CheckpointDir, Failures, best_interval, in_steps, span
from slurm_rlhf.checkpoint.resume import load_state
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.errors import CheckpointError, RunError
from slurm_rlhf.observe.run_status import finite
from slurm_rlhf.polling import in_thread
from slurm_rlhf.run.gpu_account import GpuAccount
from slurm_rlhf.run.step import TrainingStep
from slurm_rlhf.wire.calls import SaveRequest, TrainerCalls
from slurm_rlhf.wire.handles import gather

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
        return in_steps(best_interval(*self._costs(), self.failures.mtbf_s), statistics.median(self._steps))

    def words(self) -> str:
        """Describe the interval, and the reasons for it."""
        steps, step_s, (cost_s, written_s) = self.interval(), statistics.median(self._steps), self._costs()
        return (
            f"a checkpoint every {steps} steps ({span(steps * step_s)}): a step takes {span(step_s)}, a save keeps "
            f"the run waiting for {span(cost_s)} and is on disk after {span(written_s)}; {self.failures.words()}"
        )

    def _costs(self) -> tuple[float, float]:
        costs, writes = zip(*self._saves, strict=True)
        return statistics.median(costs), statistics.median(writes)


@dataclass(frozen=True, slots=True)
class Best:
    """Says which step was the best so far; more is better, and the first of equal ones."""

    metric: str
    value: float
    step: int


def better(best: Best | None, metric: str, metrics: Mapping[str, float], step: int) -> Best | None:
    """Return the best step once `step` was evaluated with `metrics`; None if `metric` is empty."""
    value = metrics.get(metric, math.nan)
    if not metric or not math.isfinite(value) or (best is not None and value <= best.value):
        return best
    return Best(metric, float(value), step)


def resumed(state: Mapping[str, Any] | None, metric: str, present: bool) -> tuple[Best | None, str]:
    """Read the best step of a checkpoint's state, or say why it no longer counts; `present`: its checkpoint exists."""
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


class PendingSave(NamedTuple):
    """Holds a checkpoint that a thread completes while the run goes on."""

    step: int
    waited_s: float  # seconds for which the run waited
    seconds: Future[float]  # time from its beginning until it was whole


REWARD_SCALE, UNEVALUATED, GPUS, PLUGINS, BEST = "reward_scale", "unevaluated", "gpus", "plugins", "best"
MODEL = "model"
"""Optional keys of a checkpoint's state."""


@dataclass(slots=True)
class RunState:
    """Holds the progress of the run after `step` steps."""

    seed: int
    step: int = 0
    policy_version: int = 0  # version of the weights that the engines hold
    responses: int = 0  # number sampled so far, without evaluations
    response_tokens: int = 0
    wall_s: float = 0.0  # seconds over all sessions of the run
    eval_before: float | None = None
    eval_after: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunState:
        """Read it from a checkpoint. Raises CheckpointError if another version of this class wrote it."""
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            raise CheckpointError(
                f"the checkpoint's run state has {sorted(data)}, this version of slurm_rlhf needs {sorted(known)}; "
                "resume with the version that wrote it"
            )
        return cls(**data)


@dataclass(slots=True)
class RunCheckpoints:
    """Saves the run with all of its roles, and takes it back to a checkpoint."""

    directory: CheckpointDir
    state: RunState
    step: TrainingStep
    saved: Callable[[int, float, float], None]
    """Gets the step of each checkpoint, the seconds until it was on disk, and the seconds for which the run waited."""
    cadence: SaveCadence
    clock: float  # time.monotonic() up to which `state.wall_s` counts
    gpus: GpuAccount | None = None
    model: Mapping[str, str] = field(default_factory=dict)  # first model of the run: path -> `model_contents`
    order: dict[str, Any] = field(default_factory=dict, init=False)  # state after the last batch that was trained on
    unevaluated: dict[str, Any] | None = field(default=None, init=False)  # metrics of a step whose evaluation is due
    best: Best | None = field(default=None, init=False)  # best step by ckpt.best_metric; its checkpoint stays
    _saved_step: int = field(default=-1, init=False)
    _pending: PendingSave | None = field(default=None, init=False)  # save that is being written

    def save(self, async_save: bool = False) -> None:
        """Write a checkpoint of the last step that was done; with `async_save`, during the next steps.

        Then it blocks only until the checkpoint before is written and the weights are copied. Raises CheckpointError,
        also for the checkpoint before.
        """
        self.finish()
        number, started = self.state.step, time.monotonic()
        self.count_wall()
        path = self.directory.begin(number)
        saves: list[Future[Any]] = []
        with self.directory.explained(number):
            for role in self._saving():
                (path / role).mkdir()
                saves += self.step.roles[role].start_all(TrainerCalls.save, SaveRequest(str(path / role), async_save))
            gather(saves)
        state, kept = self._state_dict(), () if self.best is None else (self.best.step,)
        writers = [self.step.roles[role] for role in self._saving()] if async_save else []

        def complete() -> float:
            with self.directory.explained(number):
                gather([role.ask(rank, TrainerCalls.written) for role in writers for rank in range(role.world)])
            self.directory.commit(number, state)
            self.directory.prune(self.step.config.ckpt.max_num, kept)
            return time.monotonic() - started

        self._saved_step = number
        self.cadence.begun(number)
        if async_save:
            self._pending = PendingSave(number, time.monotonic() - started, in_thread(complete, "checkpoint"))
        else:
            seconds = complete()
            self._on_disk(number, seconds, seconds)

    def poll(self) -> None:
        """Report a checkpoint that is written by now. Raises its error."""
        if self._pending is not None and self._pending.seconds.done():
            self._finished()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises its error."""
        if self._pending is None:
            return
        if not self._pending.seconds.done():
            with self.step.phases("checkpoint_wait"):
                # The error of a trainer that dies comes first; `PendingSave` has the error of one that cannot write.
                for role in self._saving():
                    self.step.roles[role].call_all(TrainerCalls.finish_save)
                wait([self._pending.seconds])
        self._finished()

    def abandon(self, timeout_s: float) -> None:
        """Wait for the checkpoint that is being written while the run fails: it may be the newest there will be."""
        if self._pending is not None and wait([self._pending.seconds], timeout_s).done:
            with contextlib.suppress(CheckpointError, RunError):
                self._finished()

    def _finished(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._on_disk(pending.step, pending.seconds.result(), pending.waited_s)

    def _on_disk(self, step: int, seconds: float, waited_s: float) -> None:
        self.cadence.saved(waited_s, seconds)
        self.saved(step, seconds, waited_s)

    def save_once(self) -> None:
        """Write a checkpoint unless the last step that was done has one, and wait for one that is being written."""
        self.finish()
        if self._saved_step != self.state.step:
            self.save()

    def judge(self, metrics: Mapping[str, float]) -> None:
        """Compare the evaluation of the last step that was done with the best one."""
        self.best = better(self.best, self.step.config.ckpt.best_metric, metrics, self.state.step)

    @property
    def candidate(self) -> bool:
        """Tell whether the last step may be the best and has no checkpoint: the next update replaces its weights."""
        if not self.step.config.ckpt.best_metric or self._saved_step == self.state.step:
            return False
        return self.unevaluated is not None or (self.best is not None and self.best.step == self.state.step)

    def load(self, path: Path, note: Callable[[str], None]) -> None:
        """Take roles, data order, KL coefficient and reward scale back to a checkpoint; `state` is loaded already.

        `note` informs the user of changes since then.
        """
        state, step = load_state(path), self.step
        step.order.load_state_dict(state["order"])
        step.kl.load_state_dict(state["kl"])
        if isinstance(step.scale, RunningScale) and "count" in (before := state.get(REWARD_SCALE, {})):
            step.scale = RunningScale(**before)
        if changes := changed_plugins(state.get(PLUGINS, {}), load_plugins(step.config.train.plugins)):
            note(
                f"warning: train.plugins since {path.name} was written: {', '.join(changes)}. The run goes on with the "
                "files as they are now"
            )
        self.unevaluated = state.get(UNEVALUATED)
        found = state.get(BEST)
        there = found is not None and self.directory.of(found["step"]).is_dir()
        self.best, message = resumed(found, step.config.ckpt.best_metric, there)
        if message:
            note(f"warning: {message}")
        if self.gpus is not None:
            self.gpus.load_state_dict(state.get(GPUS, {}))
        loads: list[Future[None]] = []
        for role in self._saving():
            loads += self.step.roles[role].start_all(TrainerCalls.load, str(path / role))
        gather(loads)
        self._saved_step = self.state.step

    def evaluated(self) -> None:
        """Note that the evaluation that was due is done: no checkpoint has it yet."""
        self.unevaluated, self._saved_step = None, -1

    def count_wall(self) -> None:
        """Bring `state.wall_s` up to date."""
        now = time.monotonic()
        self.state.wall_s += now - self.clock
        self.clock = now

    def _saving(self) -> list[str]:
        return [role for role in self.step.roles if ROLES[role].kind == "trained"]

    def _state_dict(self) -> dict[str, Any]:
        optional = {
            REWARD_SCALE: self.step.scale and asdict(self.step.scale),
            UNEVALUATED: self.unevaluated and {name: finite(value) for name, value in self.unevaluated.items()},
            BEST: self.best and asdict(self.best),
            GPUS: self.gpus and self.gpus.state_dict(),
            PLUGINS: load_plugins(self.step.config.train.plugins),
            MODEL: self.model,
        }
        state = {"run": asdict(self.state), "order": self.order, "kl": self.step.kl.state_dict()}
        return state | {key: value for key, value in optional.items() if value}

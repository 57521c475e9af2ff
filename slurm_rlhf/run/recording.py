"""Records samples, events, calls and the layout, which the report shows besides metrics.jsonl, and writes the report.

Nothing here ends a run: the first error is reported once, and the run goes on without records.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import numpy as np

from slurm_rlhf.config.schema import Config
from slurm_rlhf.observe.run_log import START, EventLog, Sample, WarningEvents, append_line, choose, truncate_after
from slurm_rlhf.observe.run_status import finite
from slurm_rlhf.observe.timing import CallSpans, StepSpans, append_timeline
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.records import Experience, SyncConnection
from slurm_rlhf.report.page import write_page
from slurm_rlhf.run_directory import RunDirectory, write_atomically
from slurm_rlhf.sampling.batches import Batch
from slurm_rlhf.wire.calls import DeviceReport, RankCalls
from slurm_rlhf.wire.codec import spec_of
from slurm_rlhf.wire.handles import RoleHandle

log = logging.getLogger(__name__)

MEMORY = spec_of(RankCalls.memory).name

FAILED_SAMPLES = 4
"""Responses of a step that are recorded because their rewards failed."""
COST = 0.01
"""Share of the run's time that reports may take."""

Method = TypeVar("Method", bound=Callable[..., Any])


def spared(method: Method) -> Method:
    """Keep errors in a method of the recorder from ending the run; the first one is reported to the user."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.gave_up(method.__name__, error)
            return None

    return guarded  # type: ignore[return-value]


class Recorder:
    """Keeps the records of one run directory up to date. `begin` comes first, `end` last."""

    def __init__(self, config: Config, directory: RunDirectory, warn: Callable[[str], None]) -> None:
        """`warn` informs the user that something cannot be recorded."""
        self._settings = config.logger
        self._seed = config.train.seed
        self._directory = directory
        self._warn = warn
        self._warned = False
        self._events = EventLog(directory.events)
        self._spans = CallSpans()
        self._taken: StepSpans | None = None  # calls of the step that has ended, until `done` writes them
        self._layout: dict[str, Any] = {}
        self._handles: Mapping[str, RoleHandle[Any]] = {}
        self._memory: dict[str, dict[str, dict[str, int]]] = {}  # role -> rank -> bytes
        self._report_s = 0.0  # seconds that the last report took
        self._reported = 0.0  # time when it was written
        self.step = 0
        """Number of steps that are done."""
        self.transfer: Callable[[], SyncConnection | None] = lambda: None
        """Returns the connection by which weights go to the engines."""
        self.pieces: Callable[[list[int]], list[str]] | None = None
        """Gives the text of each token; without it samples have no tokens."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record what the package logs as a warning."""
        handler, logger = WarningEvents(self.event), logging.getLogger("slurm_rlhf")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    @spared
    def begin(self, step: int) -> None:
        """Drop records after `step`, from which the run goes on."""
        self.step = step
        self.phase(START)
        for path in (self._directory.samples, self._directory.timeline):
            truncate_after(path, step)

    @spared
    def event(self, kind: str, text: str, engine: int | None = None) -> None:
        """Record an event; `engine`: the one that it is about, if any. Any thread may call it."""
        self._events.append(kind, self.step, text, engine)

    @spared
    def place(self, ranks: RankMap) -> None:
        """Record where the ranks are."""
        self._put(ranks=ranks.to_json())

    def _put(self, **facts: Any) -> None:
        """Write the layout if `facts` change it."""
        if any(self._layout.get(name) != value for name, value in facts.items()):
            self._layout |= facts
            write_atomically(self._directory.layout, json.dumps(self._layout, indent=1) + "\n")

    def watch(self, handles: Mapping[str, RoleHandle[Any]]) -> None:
        """Record the calls of `handles` from here on."""
        self._handles = handles
        for role, handle in handles.items():
            handle.watchers.append(partial(self._began, role))

    def _began(self, role: str, rank: int, name: str) -> Callable[[], None]:
        """Note a call, except this recorder's own."""
        return self._spans.began(role, rank, name) if name != MEMORY else lambda: None

    def _measured(self, role: str, rank: int, answer: Future[DeviceReport]) -> None:
        if answer.exception() is None:
            found = answer.result()
            self._memory.setdefault(role, {})[str(rank)] = {"used": found.used, "total": found.total}

    def take(self) -> StepSpans:
        """Return the calls of the step that ends now, which `done` is going to record."""
        self._taken = self._spans.take()
        return self._taken

    @spared
    def phase(self, name: str) -> None:
        """Note that a phase of the conductor begins; empty: none."""
        self._spans.phase(name)

    def stepping(self) -> None:
        """Note that the first step begins."""
        self.phase("")
        self._spans.take()
        self._taken = None

    @spared
    def samples(self, batch: Batch, experience: Experience) -> list[Sample]:
        """Record a few responses of a step and some whose rewards failed, and return them."""
        count = min(self._settings.samples, len(batch.trajectories))
        if not count or batch.scored is None:
            return []
        chosen = choose(self._seed, batch.step, count, len(batch.trajectories))
        failed = [] if batch.scored.failed is None else np.flatnonzero(batch.scored.failed != "").tolist()
        rows = sorted({*chosen, *failed[:FAILED_SAMPLES]})
        found = [sample_of(batch, experience, row, self.pieces) for row in rows]
        for sample in found:
            append_line(self._directory.samples, asdict(sample))
        return found

    @spared
    def done(self, step: int) -> None:
        """Record the calls of a step that is done; write the report if it is due."""
        first, self.step = self.step == 0 or not self._reported, step
        spans, self._taken = self._taken or self._spans.take(), None
        append_timeline(self._directory.timeline, spans.line(step))
        if way := self.transfer():
            self._put(weight_transfer={"backend": way.backend, "interface": way.interface})
        every = self._settings.report_steps
        due = every and step % every == 0
        for role, handle in self._handles.items() if first or due else ():
            for number in handle.ready:  # the answers come when the ranks have the time
                take = partial(self._measured, role, handle.rank_of(number))
                handle.call(number, RankCalls.memory).add_done_callback(take)
        if every and (first or due) and time.monotonic() - self._reported >= self._report_s / COST:
            self._report()

    @spared
    def end(self) -> None:
        """Write the report; the summary was written before."""
        self._report()

    def _report(self) -> None:
        began = time.monotonic()
        if self._memory:
            self._put(memory={role: dict(ranks) for role, ranks in list(self._memory.items())})
        write_page(self._directory.report, [self._directory])
        self._reported = time.monotonic()
        self._report_s = self._reported - began

    def gave_up(self, what: str, error: Exception) -> None:
        """Warn the user, once, that something is not recorded."""
        if not self._warned:
            self._warned = True
            log.exception("not recorded")
            self._warn(
                f"warning: {self._directory.report.name} and what it shows will not be complete, at {what!r}: "
                f"{type(error).__name__}: {error}. The run goes on"
            )


def sample_of(
    batch: Batch, experience: Experience, row: int, pieces: Callable[[list[int]], list[str]] | None
) -> Sample:
    """Describe response `row` of a batch."""
    assert batch.scored is not None
    trajectory, columns = batch.trajectories[row], experience.columns
    prompt = batch.prompts[row * len(batch.prompts) // len(batch.trajectories)]
    label = prompt.label if prompt.label is None or isinstance(prompt.label, bool | int | str) else str(prompt.label)
    start, end = (int(offset) for offset in experience.action_offsets[row : row + 2])

    def numbers(name: str) -> list[float | None]:
        return [finite(round(float(value), 5)) for value in columns[name][start:end]] if name in columns else []

    advantages = columns.get("advantages")
    return Sample(
        step=batch.step,
        prompt_index=prompt.index,
        sample=trajectory.sample,
        prompt=trajectory.began or prompt.text,
        response=trajectory.text,
        label=label,
        reward=finite(float(batch.scored.rewards[row])),
        score=None if batch.scored.scores is None else finite(float(batch.scored.scores[row])),
        advantage=finite(float(np.mean(advantages[start:end]))) if advantages is not None and end > start else None,
        finish_reason=trajectory.finish_reason,
        engine=trajectory.engine,
        version=trajectory.versions[0].version if trajectory.versions else 0,
        tokens=pieces(trajectory.response_ids.tolist()) if pieces else [],
        logprobs=numbers("rollout_logprobs"),
        actor_logprobs=numbers("logprobs"),
        failed="" if batch.scored.failed is None else str(batch.scored.failed[row]),
        observed=np.flatnonzero(np.diff(~trajectory.action_mask, prepend=False, append=False)).tolist(),
    )

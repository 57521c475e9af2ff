"""Record what happens to a run beside its steps, with the time: events.jsonl, one line each, over all of its starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.observe.jsonl import append_line, read_rows

START: Final = "start"
RESUME: Final = "resume"
STOP: Final = "stop"
REQUEUE: Final = "requeue"
RESTART: Final = "restart"
WARNING: Final = "warning"
HANG: Final = "hang"
ERROR: Final = "error"
CHECKPOINT: Final = "checkpoint"
FINISH: Final = "finish"
ENGINE_LOST: Final = "engine lost"
ENGINE_JOINED: Final = "engine joined"
"""Kinds of events. A hang: a rank was silent, or did not answer in time. A restart: roles were started again in the
same job, and the session goes on."""

BEGINS, ENDS = (START, RESUME), (STOP, HANG, ERROR, FINISH)
"""Kinds that begin and end a session, which is one start of the run."""

_LONGEST = 2000  # characters of a text


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Says what happened after `step` steps, at the Unix time `at`."""

    event: str
    at: float
    step: int
    text: str
    engine: int | None = None  # number of the engine that the event concerns


class EventLog:
    """Append events to a file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def append(self, event: str, step: int, text: str, engine: int | None = None) -> None:
        """Write one event, of one `engine` perhaps. Raises OSError."""
        row = asdict(RunEvent(event, round(self._clock(), 3), step, text[:_LONGEST], engine))
        append_line(self._path, {name: value for name, value in row.items() if value is not None})


def read_events(path: Path) -> list[RunEvent]:
    """Read all events, in the order in which they were written; lines that hold something else are skipped."""
    found = []
    for row in read_rows(path, "event"):
        try:
            found.append(_event(row))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _event(row: dict[str, Any]) -> RunEvent:
    engine = row.get("engine")
    what = (str(row["event"]), float(row["at"]), int(row["step"]), str(row["text"]))
    return RunEvent(*what, None if engine is None else int(engine))


def kind_of_note(text: str) -> str:
    """Return the kind of a line that the user was shown; empty: none, it only tells how the run goes on."""
    return WARNING if text.startswith("warning") or ": warning: " in text else ""


def kind_of_failure(error: BaseException) -> str:
    """Return whether what ended a run is a hang or another error."""
    return HANG if isinstance(error, SlurmRlhfError) and error.hang else ERROR


def engines_lost(events: Sequence[RunEvent]) -> dict[int, str]:
    """Return the engines that a run does without since its last start, and what was said of each."""
    lost: dict[int, str] = {}
    for event in events:
        if event.event in BEGINS:
            lost.clear()
        elif event.engine is not None and event.event == ENGINE_LOST:
            lost[event.engine] = event.text
        elif event.engine is not None and event.event == ENGINE_JOINED:
            lost.pop(event.engine, None)
    return lost


class WarningEvents(logging.Handler):
    """Passes on what the package logs as a warning: ranks that are lost, updates that are repeated."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell kind and text; `errors.of_hang` marks what is about a hang. Errors have events of their own."""
        if record.levelno == logging.WARNING:
            try:
                self._tell(HANG if getattr(record, "hang", False) else WARNING, record.getMessage())
            except Exception:  # as of a full disk; whoever logs, a thread that all ranks need perhaps, goes on
                self.handleError(record)

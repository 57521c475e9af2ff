"""Write and read the files of a run that hold one JSON object a line: events.jsonl, samples.jsonl and others.

A line is written whole; a reader passes over a line that a kill or a full disk has cut.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import textwrap
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import ValidationError, convert

from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.run_directory import write_atomically

T = TypeVar("T")


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Write one line. The operating system has it when this returns. Raises OSError; ValueError for NaN."""
    line = json.dumps(row, ensure_ascii=False, allow_nan=False)
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(line + "\n")


def whole_lines(text: str, key: str = "step") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, row) for each whole line whose object has `key`. Only a newline ends a line."""
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and key in row:
            yield line, row


def read_rows(path: Path, key: str = "step", wanted: Container[int] | None = None) -> list[dict[str, Any]]:
    """Read the whole lines of a file as far as it can be read; none if it is missing, or not a regular file.

    `wanted`: the numbers of the lines to read, from 0 on; None: all.
    """
    found: list[dict[str, Any]] = []
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                for number, line in enumerate(file):
                    if wanted is None or number in wanted:
                        text = line.decode("utf-8", "replace").removesuffix("\n")
                        rows = (row for _, row in whole_lines(text, key))
                        found += [{sys.intern(name): value for name, value in row.items()} for row in rows]
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; empty if it is missing, half written, or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def count_lines(path: Path) -> int:
    """Count the lines of a file; 0 if it is missing or cannot be read."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return sum(1 for _ in file)
    return 0


def truncate_after(path: Path, step: int) -> int:
    """Drop the lines after `step`, which a resumed run writes again, and any half line; return how many lines.

    The other lines keep every byte.
    """
    if not path.is_file():
        return 0
    lines = list(whole_lines(path.read_text(encoding="utf-8", errors="replace")))
    kept = [line for line, row in lines if row["step"] <= step]
    write_atomically(path, "".join(line + "\n" for line in kept), durable=True)
    return len(lines) - len(kept)


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
"""Kinds of events. HANG: a rank was silent, or did not answer in time. RESTART: roles were started again in the same
job, and the session goes on."""

BEGINS, ENDS = (START, RESUME), (STOP, HANG, ERROR, FINISH)
"""Kinds that begin and end a session, one start of the run."""

_LONGEST = 2000  # characters of a text


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Say what happened after `step` steps, at the Unix time `at`."""

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
        """Write one event. Raises OSError."""
        row = asdict(RunEvent(event, round(self._clock(), 3), step, text[:_LONGEST], engine))
        append_line(self._path, {name: value for name, value in row.items() if value is not None})


def read_events(path: Path) -> list[RunEvent]:
    """Read all events in the order in which they were written; skip lines that hold something else."""
    return _converted(read_rows(path, "event"), RunEvent)


def _converted(rows: Iterable[dict[str, Any]], kind: type[T]) -> list[T]:
    found = []
    for row in rows:
        with suppress(ValidationError):
            found.append(convert(row, kind))
    return found


def kind_of_note(text: str) -> str:
    """Return the kind of a line that was shown to the user: WARNING, or empty if it only reports progress."""
    return WARNING if text.startswith("warning") or ": warning: " in text else ""


def kind_of_failure(error: BaseException) -> str:
    """Return the kind of the error that ended a run: HANG or ERROR."""
    return HANG if isinstance(error, SlurmRlhfError) and error.hang else ERROR


def engines_lost(events: Sequence[RunEvent]) -> dict[int, str]:
    """Return the engines that are lost since the last start of a run, each with the text of its event."""
    lost: dict[int, str] = {}
    for event in events:
        if event.event in BEGINS:
            lost.clear()
        elif event.engine is not None and event.event == ENGINE_LOST:
            lost[event.engine] = event.text
        elif event.engine is not None and event.event == ENGINE_JOINED:
            lost.pop(event.engine, None)
    return lost


SERVER_AWAITED = "warning: the run waits for a server"
SERVER_BACK = "warning: a server answers again"
"""Beginnings of the events between which a run is paused."""


def server_awaited(events: Sequence[RunEvent]) -> str:
    """Return the text that says for which server the run waits; empty: for none."""
    waited = ""
    for event in events:
        if event.event in BEGINS or event.text.startswith(SERVER_BACK):
            waited = ""
        elif event.text.startswith(SERVER_AWAITED):
            waited = event.text
    return waited


WORKERS_LOST = "warning: workers are lost"
"""Beginning of the event of a node whose workers are lost until the next start."""


def workers_lost(events: Sequence[RunEvent]) -> list[str]:
    """Return the texts that name nodes whose workers are lost since the last start of a run."""
    begun = max((place for place, event in enumerate(events) if event.event in BEGINS), default=0)
    return [event.text for event in events[begun:] if event.text.startswith(WORKERS_LOST)]


class WarningEvents(logging.Handler):
    """Pass on warnings that the package logs: ranks that are lost, updates that are repeated."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on kind and text; `errors.of_hang` marks a hang. Errors have events of their own."""
        if record.levelno == logging.WARNING:
            try:
                self._tell(HANG if getattr(record, "hang", False) else WARNING, record.getMessage())
            except Exception:  # a full disk must not stop the thread that logs
                self.handleError(record)


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold a response and its figures. Lists have one entry per response token, or none."""

    step: int
    prompt_index: int  # the row of the data set
    sample: int  # number of the response among those to the prompt
    prompt: str
    response: str
    label: Any  # as the reward function got it; as text if it is no plain value
    reward: float | None  # as the reward function returned it; None for NaN
    score: float | None  # None: the reward function gives no scores
    advantage: float | None  # mean over the tokens of the response
    finish_reason: str
    engine: int
    version: int  # policy version that sampled the first token
    tokens: list[str]  # with special tokens
    logprobs: list[float | None]  # computed by the engine
    actor_logprobs: list[float | None]  # computed by the actor, before the update
    observed: list[int] = field(default_factory=list)  # begin and end of each observation in `tokens`, in turn
    failed: str = ""  # why the reward could not be computed; empty: it could


def choose(seed: int, step: int, count: int, total: int) -> list[int]:
    """Draw `count` of `total` responses of a step, in order; equal in all runs with this seed."""
    return sorted(random.Random(f"{seed} samples {step}").sample(range(total), min(count, total)))


def read_samples(path: Path, wanted: Container[int] | None = None) -> list[Sample]:
    """Read the samples in the lines `wanted` (None: all lines); skip lines that hold something else."""
    return _converted(read_rows(path, wanted=wanted), Sample)


def markdown_text(sample: Sample) -> str:
    """Format a sample as Markdown for TensorBoard: texts as indented code, so that they are shown as they are."""
    head = f"step {sample.step}, prompt {sample.prompt_index}: reward {_number(sample.reward)}, {sample.finish_reason}"
    return f"{head}\n\nprompt\n\n{_code(sample.prompt)}\n\nresponse\n\n{_code(sample.response)}\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _code(text: str) -> str:
    return textwrap.indent(text or " ", "    ", lambda line: True)

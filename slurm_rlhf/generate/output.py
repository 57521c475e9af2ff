"""Writes the output of a job, one line for each (row, sample), counts its lines, and reports the progress."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import DataError
from slurm_rlhf.observe.progress import duration
from slurm_rlhf.placement.rank_map import TpGroup
from slurm_rlhf.records import EngineLoad

OUTPUT = "output.jsonl"
MERGED = "merged.jsonl"
SYNC_S = 1.0
"""Seconds of written work that a crash of the node can cost; a process that is killed costs none."""


@dataclass(frozen=True, slots=True)
class OutputLine:
    """Holds one line of the output: one sample of one row."""

    row: int  # number of the row in the file, from 0
    sample: int
    prompt: str | None  # text before tokenization; None: the row has none
    response: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None  # number of response tokens
    score: float | None = None
    seed: int | None = None
    engine: int | None = None
    error: str = ""
    token_ids: Sequence[int] | None = None  # written with their log-probs, if wanted
    logprobs: Sequence[float] | None = None


def line_of(answer: OutputLine) -> bytes:
    """Write a line of the output, with its end."""
    row = asdict(answer)
    if answer.logprobs is None:
        del row["token_ids"], row["logprobs"]
    if not answer.error:
        del row["error"]
    # ASCII: UTF-8 cannot encode a lone surrogate, and no reader takes an escaped U+2028 for the end of a line.
    return json.dumps(row).encode("ascii") + b"\n"


@dataclass(slots=True)
class OutputCounts:
    """Counts the lines of an output."""

    done: set[tuple[int, int]] = field(default_factory=set)  # (row, sample)
    errors: int = 0
    tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    scored: int = 0
    score_sum: float = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Count a line. Raises KeyError for a line of another format."""
        self.done.add((int(line["row"]), int(line["sample"])))
        self.errors += bool(line.get("error"))
        self.tokens += line.get("tokens") or 0
        if reason := line.get("finish_reason"):
            self.finish_reasons[reason] += 1
        if (score := line.get("score")) is not None:
            self.scored += 1
            self.score_sum += score


def whole_lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield begin, end and content of each line; a torn last line is left out.

    A line is torn if a process was killed, or a node crashed, while it was written. Raises DataError for any other line
    of another format: a job does not write such lines.
    """
    begin, torn = 0, ""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if torn:
                raise DataError(
                    f"{path}:{number - 1}: {torn}. Nothing is changed: mend or remove that line, and the job goes on; "
                    "a row that is removed is answered again"
                )
            end = begin + len(line)
            found = _read(line)
            if found is None:
                torn = "this line is no row of an output"
            else:
                yield begin, end, found
            begin = end


def _read(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
        return found if {"row", "sample"} <= found.keys() else None
    except (ValueError, AttributeError):
        return None


class OutputFile:
    """Appends to the output of a job. After a crash a line is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Open `path`, cut off a torn last line, and count the lines. Raises OSError, DataError."""
        self.path = path
        self.counts = OutputCounts()
        self._unsynced = False
        self._synced_at = 0.0
        end = 0
        if path.exists():
            for _, end, line in whole_lines(path):  # noqa: B007 `end` of the last one counts
                self.counts.add(line)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, end)
        self._end = end

    def append(self, answers: Sequence[OutputLine]) -> None:
        """Append lines. Raises OSError, and leaves the file as it was."""
        if not answers:
            return
        data = b"".join(map(line_of, answers))
        view = memoryview(data)
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, view[written:], self._end + written)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)
        self._unsynced = True
        for line in data.splitlines():
            self.counts.add(json.loads(line))

    def sync(self, now: float, least_s: float = SYNC_S) -> None:
        """Force the lines to the disk, unless that was done less than `least_s` seconds ago. Raises OSError."""
        if self._unsynced and now - self._synced_at >= least_s:
            os.fsync(self._descriptor)
            self._unsynced, self._synced_at = False, now

    def close(self) -> None:
        """Force everything to the disk and close the file. Raises OSError."""
        try:
            if self._unsynced:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


LINE_S = 10.0
_SHOWN = 8  # most engines in a line


@dataclass(slots=True)
class JobProgress:
    """Counts the work of this start of a job."""

    total: int  # number of responses of all rows of this job
    groups: dict[int, TpGroup]
    began: float  # time of the start, by the clock that all calls use
    before: int = 0  # number of responses that earlier starts have written
    refused: int = 0  # number of error lines of bad rows, written by this start
    loads: dict[int, EngineLoad] = field(default_factory=dict)
    since: float | None = None  # time when the first engine was ready
    _last: float = 0.0

    def due(self, now: float) -> bool:
        """Tell whether a line is due; then the next one is due `LINE_S` later."""
        if now - self._last < LINE_S:
            return False
        self._last = now
        return True

    def left_s(self, done: int, now: float) -> float | None:
        """Estimate the seconds until the end by the speed of this start so far; None: not known yet."""
        new = done - self.before - self.refused
        if self.since is None or new <= 0 or now <= self.since:
            return None
        return (self.total - done) * (now - self.since) / new

    def line(self, counts: OutputCounts, ready: int, now: float) -> str:
        """Write `120 of 500 responses (24 %), 2 engines, 830 tokens/s (0: 410, 1: 420), 3 min left`."""
        done = len(counts.done)
        parts = [f"{done} of {self.total} responses ({done / max(self.total, 1):.0%})".replace("%", " %")]
        parts.append(f"{ready} of {len(self.groups)} engines")
        rates = {engine: load.tokens_per_s for engine, load in sorted(self.loads.items())}
        if rates:
            shown = ", ".join(f"{engine}: {rate:.0f}" for engine, rate in list(rates.items())[:_SHOWN])
            more = ", ..." if len(rates) > _SHOWN else ""
            parts.append(f"{sum(rates.values()):.0f} tokens/s ({shown}{more})")
        if counts.errors:
            parts.append(f"{counts.errors} errors")
        left = self.left_s(done, now)
        if left is not None and done < self.total:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def summary(
        self, status: str, counts: OutputCounts, lost: dict[int, str], now: float, **more: Any
    ) -> dict[str, Any]:
        """Return summary.json for the job so far; figures of engines cover this start only."""
        engines = [
            {
                "engine": engine,
                "node": group.node,
                "gpus": list(group.gpus),
                "tokens": self.loads.get(engine, EngineLoad()).tokens,
                "responses": self.loads.get(engine, EngineLoad()).responses,
                "tokens_per_s": round(self.loads.get(engine, EngineLoad()).tokens_per_s, 1),
                "lost": lost.get(engine, ""),
            }
            for engine, group in sorted(self.groups.items())
        ]
        tokens = sum(load.tokens for load in self.loads.values())
        return {
            "status": status,
            "responses": len(counts.done),
            "total_responses": self.total,
            "before": self.before,
            "errors": counts.errors,
            "tokens": counts.tokens,
            "finish_reasons": dict(counts.finish_reasons),
            "score": counts.score_sum / counts.scored if counts.scored else None,
            "wall_s": round(now - self.began, 3),
            "tokens_per_s": round(tokens / max(now - (self.since or self.began), 1e-9), 1) if tokens else 0.0,
            "engines": engines,
            **more,
        }

"""Writes the output of a job, one line for each (row, sample), and counts the lines that are there."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import DataError

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
    error, logged = row.pop("error"), {name: row.pop(name) for name in ("token_ids", "logprobs")}
    if answer.logprobs is not None:
        row |= logged
    if error:
        row["error"] = error
    # ASCII: a lone surrogate of a prompt has no UTF-8, and no reader takes an escaped line end for one.
    return json.dumps(row).encode("ascii") + b"\n"


@dataclass(slots=True)
class OutputCounts:
    """Counts the lines of an output."""

    samples: Counter[int] = field(default_factory=Counter)  # row -> lines
    done: set[tuple[int, int]] = field(default_factory=set)  # (row, sample)
    errors: int = 0
    tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    scored: int = 0
    score_sum: float = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Count a line. Raises KeyError for a line of another format."""
        key = (int(line["row"]), int(line["sample"]))
        self.done.add(key)
        self.samples[key[0]] += 1
        self.errors += bool(line.get("error"))
        self.tokens += line.get("tokens") or 0
        if reason := line.get("finish_reason"):
            self.finish_reasons[reason] += 1
        if (score := line.get("score")) is not None:
            self.scored += 1
            self.score_sum += score

    def complete(self, row: int, n: int) -> bool:
        """Tell whether all `n` samples of a row are there."""
        return self.samples[row] == n


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

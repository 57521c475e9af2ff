"""Write metrics.jsonl, TensorBoard's events and summary.json, and read from them how far a run is.

TensorBoard's events are written without TensorFlow, torch or a thread: TensorBoard's writer of events would import
TensorFlow if that is installed; its message classes and its writer of records do not.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from slurm_rlhf.observe.log_tail import read_end
from slurm_rlhf.observe.run_log import Sample, append_line, markdown_text, read_object, whole_lines
from slurm_rlhf.observe.sinks import TrackedRun, grouped
from slurm_rlhf.run_directory import write_atomically

TIMED = ("time/", "perf/")
"""Metrics that depend on the clock; all others are equal bit for bit in two runs under full determinism."""


def append_metrics(path: Path, step: int, metrics: dict[str, float]) -> None:
    """Append the line of a step: `step` comes first, then the other metrics by name, timings last.

    The line is safe if the run is killed after that. Floats are written as their shortest exact representation
    (Python's repr), so that numbers are equal bit for bit if lines are equal. NaN and infinities, which JSON lacks,
    become null. Raises OSError.
    """
    names = sorted(metrics, key=lambda name: (name.startswith(TIMED), name))
    append_line(path, {"step": step, **{name: finite(metrics[name]) for name in names}})


def finite(value: float | None) -> float | int | None:
    """Convert a number, NumPy scalars included, to a plain one for JSON; None if JSON cannot hold it."""
    if value is None:
        return None
    plain = value if isinstance(value, int) else float(value)
    return plain if math.isfinite(plain) else None


class TensorBoardEvents:
    """Implement `sinks.Sink`: a scalar per metric and step. Each start of a run writes a file of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None

    def open(self, run: TrackedRun) -> str:
        """Do nothing yet: the first step makes the file."""
        return ""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, so that TensorBoard can show them at once."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        file = self._file or self._open(step)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in grouped(metrics).items()]
        self._write(file, step=step, summary=Summary(value=values))
        file.flush()

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write texts, which TensorBoard shows as Markdown."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        file = self._file or self._open(step)
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for place, sample in enumerate(samples):
            tensor = TensorProto(dtype=DT_STRING, string_val=[markdown_text(sample).encode("utf-8", "replace")])
            value = Summary.Value(tag=f"samples/{place}", metadata=kind, tensor=tensor)
            self._write(file, step=step, summary=Summary(value=[value]))
        file.flush()

    def close(self, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step: int) -> BinaryIO:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._directory / name).open("wb")
        self._write(self._file, file_version="brain.Event:2")
        # A resumed run marks the step from which the entries of earlier files are void.
        self._write(self._file, step=step, session_log=SessionLog(status=SessionLog.START))
        return self._file

    def _write(self, file: BinaryIO, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(file).write(Event(wall_time=time.time(), **fields).SerializeToString())


@dataclass(slots=True)
class Summary:
    """Describe how a run went; `status` is running, finished, stopped, interrupted or failed."""

    status: str
    steps: int
    total_steps: int
    eval_before: float | None
    eval_after: float | None
    reward_first: float | None
    reward_last: float | None
    wall_s: float  # seconds of all starts of the run together, loading included
    tokens_per_s: float  # sampled tokens / wall_s
    policy_version: int
    world: dict[str, int]  # role -> ranks
    seed: int
    self_check: dict[str, float] = field(default_factory=dict)  # name of a check -> figure, from the last start
    error: str = ""
    starting: str = ""  # the last message while the run starts; empty once the steps have begun
    gpus: dict[str, Any] | None = None  # `GpuAccount.summary`; None without GPUs
    phases: dict[str, Any] = field(default_factory=dict)  # phase -> seconds, predicted and measured
    best: dict[str, Any] | None = None  # metric, value, step, checkpoint; None without ckpt.best_metric
    restarts: list[str] = field(default_factory=list)  # why roles were restarted in place, since the last start

    @classmethod
    def read(cls, path: Path) -> Summary:
        """Read what a run has written; ignore fields that this version does not know."""
        known, found = {one.name for one in fields(cls)}, json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: value for name, value in found.items() if name in known})

    def write(self, path: Path) -> None:
        """Replace `path` atomically, so that readers always find a whole file, also after a crash of the node."""
        content = asdict(self)
        for name in ("gpus", "phases", "best", "starting", "restarts"):
            if not content[name]:
                del content[name]
        content |= {name: finite(value) for name, value in content.items() if isinstance(value, float)}
        content["self_check"] = {name: finite(value) for name, value in self.self_check.items()}
        write_summary(path, content)


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` by `content`; on a full disk only with the first line of its `error`. Raises OSError."""
    try:
        write_atomically(path, json.dumps(content, indent=2) + "\n", durable=True)
    except OSError:
        # There is no space for a second file, but the blocks of the existing one can hold a short text.
        short = {**content, "error": str(content.get("error", "")).partition("\n")[0]}
        text = (json.dumps(short, indent=2) + "\n").encode()
        if len(text) > path.stat().st_blocks * 512:
            raise
        with path.open("r+b") as file:
            file.write(text)
            file.truncate()


_READ = 1 << 20  # bytes from the end of metrics.jsonl
_WINDOW = 20  # steps that the estimate looks back


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Say how far a run is."""

    status: str  # as in `Summary`; empty if there is no summary.json
    step: int
    total: int
    step_s: float | None  # mean seconds of the last steps
    age_s: float | None  # seconds since the last step
    error: str
    starting: str  # the last message of a start that has not reached its first step
    starting_s: float  # seconds since that message
    restarts: tuple[str, ...]  # restarts in place since the last start of the run
    rows: list[dict[str, Any]]  # the last lines of metrics.jsonl

    @property
    def reward(self) -> float | None:
        """Return the reward of the last step."""
        return self.rows[-1].get("reward") if self.rows else None

    @property
    def left_s(self) -> float | None:
        """Estimate the seconds that the remaining steps take; None while nothing is known."""
        return None if self.step_s is None else (self.total - self.step) * self.step_s


def read_run_status(metrics: Path, summary: Path) -> RunStatus:
    """Read the two files; a file that is missing or half written counts as empty."""
    ended = read_object(summary)
    rows: list[dict[str, Any]] = []
    with suppress(OSError):
        rows = [row for _, row in whole_lines(read_end(metrics, most=_READ))]
    seconds = [row["time/step"] for row in rows if row.get("time/step") is not None][-_WINDOW:]
    return RunStatus(
        status=str(ended.get("status", "")),
        step=max(int(rows[-1]["step"]) if rows else 0, int(ended.get("steps", 0))),
        total=int(ended.get("total_steps", 0)),
        step_s=sum(seconds) / len(seconds) if seconds else None,
        age_s=max(0.0, time.time() - metrics.stat().st_mtime) if rows else None,
        error=str(ended.get("error", "")),
        starting=str(ended.get("starting", "")),
        starting_s=max(0.0, time.time() - summary.stat().st_mtime) if ended.get("starting") else 0.0,
        restarts=tuple(map(str, ended.get("restarts", ()))),
        rows=rows,
    )

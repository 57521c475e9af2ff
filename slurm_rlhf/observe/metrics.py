"""Record the numbers of every step: metrics.jsonl, one JSON object per step, and TensorBoard's events.

TensorBoard's events are written without TensorFlow, torch or a thread: TensorBoard's writer of events would import
TensorFlow if that is installed; its message classes and its writer of records do not.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from slurm_rlhf.observe.run_log import Sample, append_line, markdown_text
from slurm_rlhf.observe.sinks import TrackedRun, grouped

TIMED = ("time/", "perf/")
"""Metrics that depend on the clock; all others are equal bit for bit in two runs under full determinism."""


def append_metrics(path: Path, step: int, metrics: dict[str, float]) -> None:
    """Append the line of a step: `step` comes first, then the other metrics by name, timings last.

    A run that is killed after that does not lose it. Floats are written as their shortest exact representation
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

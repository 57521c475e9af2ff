"""Record the numbers of every step: metrics.jsonl, one JSON object per step, and TensorBoard's events.

TensorBoard's events are written without TensorFlow, without torch and without a thread: its writer imports TensorFlow
if that is installed; its message classes do not. The file is a sequence of TFRecords: uint64 length, masked CRC-32C of
the length, the message, masked CRC-32C of the message; little-endian (tensorflow/core/lib/io/record_writer.h).
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from slurm_rlhf.observe.jsonl import drop_end, truncate_after
from slurm_rlhf.observe.samples import Sample, markdown_text
from slurm_rlhf.observe.trackers.sink import grouped

# Metrics that depend on the clock; all others are equal bit for bit in two runs under full determinism.
TIMED = ("time/", "perf/")


class MetricsLog:
    """Append a line per step: `step` comes first, then the other metrics by name, timings last.

    Floats are written as their shortest exact representation (Python's repr), so that equal lines mean equal numbers,
    bit for bit. NaN and infinities, which JSON lacks, become null.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line. The operating system has it when this returns, so a killed run does not lose it."""
        names = sorted(metrics, key=lambda name: (name.startswith(TIMED), name))
        line = json.dumps({"step": step, **{name: finite(metrics[name]) for name in names}}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def truncate_after(self, step: int) -> int:
        """Drop the lines after `step`, which a resumed run writes again, and any half line; return how many steps.

        The lines that stay keep every byte.
        """
        return truncate_after(self._path, step)

    def drop_end(self, step: int) -> None:
        """Drop the line of `step`, the last one, and what is behind it: it is written anew."""
        drop_end(self._path, step)


def finite(value: float | None) -> float | int | None:
    """Convert to a plain Python number for JSON, None if JSON cannot hold it. Accepts NumPy scalars as well."""
    if value is None:
        return None
    plain = value if isinstance(value, int) else float(value)
    return plain if math.isfinite(plain) else None


_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_MASK = 0xA282EAD8


class TensorBoardEvents:
    """Implement `trackers.sink.Sink`: a scalar per metric and step. A resumed run adds another file to those there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None

    def open(self) -> str:
        """Do nothing yet: the first step makes the file."""
        return ""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric of a step; TensorBoard can show it while the run goes on."""
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
        # A resumed run says from which step on the entries of earlier files are void.
        self._write(self._file, step=step, session_log=SessionLog(status=SessionLog.START))
        return self._file

    def _write(self, file: BinaryIO, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        data = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)

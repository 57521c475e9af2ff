"""TensorBoard events, written without TensorFlow and without torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class TensorBoardEvents:
    """One scalar per metric and step. The file is made by the first one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        """Write every metric of a step; it can be looked at while the run goes on."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._directory))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(metrics.items())]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

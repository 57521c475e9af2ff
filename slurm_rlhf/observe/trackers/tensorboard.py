"""TensorBoard: events in files, written by the conductor itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_rlhf.observe.metrics import TensorBoardEvents
from slurm_rlhf.observe.samples import Sample, markdown_text


class TensorBoardSink:
    """Implements `Sink`; nothing is written before the first step."""

    def __init__(self, directory: Path) -> None:
        self._events = TensorBoardEvents(directory)

    def open(self) -> str:
        return ""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._events.scalars(step, dict(metrics))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for place, sample in enumerate(samples):
            self._events.text(step, f"samples/{place}", markdown_text(sample))

    def close(self, failed: bool) -> None:
        self._events.close()

"""What a tracker has to do, and what it is told about the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_rlhf.observe.samples import Sample


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Says which run it is."""

    id: str  # the same after a resume
    name: str
    project: str
    directory: str  # for the files of this tracker
    online: bool  # it may use the network
    config: dict[str, Any]  # dotted key -> value


class Sink(Protocol):
    """Takes what a run measures. `open` comes first, `close` last; one thread calls all of them.

    Each may block and may raise whatever it likes: its caller then says so once, and goes on without this tracker.
    """

    def open(self) -> str:
        """Begin the run, or go on with it; return what the user has to know to look at it."""
        ...

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step; an earlier step than the last one has news only."""
        ...

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write responses of a step; its metrics come after them."""
        ...

    def close(self, failed: bool) -> None:
        """End this part of the run, and write everything."""
        ...


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """Put metrics without a group under `train/`, as all trackers show them."""
    return {name if "/" in name else f"train/{name}": float(value) for name, value in sorted(metrics.items())}


COLUMNS = ("step", "prompt", "response", "reward", "score", "label", "finish_reason")
"""Of a table of samples."""


def table_row(sample: Sample) -> list[Any]:
    """Return the cells of a sample, in the order of `COLUMNS`."""
    label = None if sample.label is None else str(sample.label)
    return [getattr(sample, name) if name != "label" else label for name in COLUMNS]

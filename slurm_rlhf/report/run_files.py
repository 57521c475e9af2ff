"""Read a run directory. Missing and half-written parts are left out, so that any run can have a report."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.config.pipeline import EVALUATED
from slurm_rlhf.config.text import flat
from slurm_rlhf.observe.run_log import RunEvent, Sample, count_lines, read_events, read_object, read_rows, read_samples
from slurm_rlhf.run_directory import RunDirectory

SAMPLES = 300
"""Samples of a run on a page: half of them the newest, the others evenly from the whole run."""


def shown_places(total: int) -> list[int]:
    """Choose at most `SAMPLES` of `total` lines: the newest, and as many of the earlier ones, evenly."""
    if total <= SAMPLES:
        return list(range(total))
    half = SAMPLES // 2
    return [*(place * (total - half) // half for place in range(half)), *range(total - half, total)]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Hold what a run has written."""

    name: str  # the directory's name
    root: str
    rows: list[dict[str, Any]]  # the lines of metrics.jsonl
    samples: list[Sample]  # chosen by `shown_places`
    samples_of: int  # number of samples in the file
    events: list[RunEvent]
    timeline: list[dict[str, Any]]  # as `StepSpans.line` returns them
    layout: dict[str, Any]
    summary: dict[str, Any]
    config: dict[str, Any]  # dotted key -> value
    evaluations: list[dict[str, Any]]  # as `read_evaluations` returns them

    @classmethod
    def read(cls, directory: RunDirectory) -> RunFiles:
        """Read everything."""
        root, samples_of = directory.root.absolute(), count_lines(directory.samples)
        return cls(
            name=root.name,
            root=str(root),
            rows=read_rows(directory.metrics),
            samples=read_samples(directory.samples, set(shown_places(samples_of))),
            samples_of=samples_of,
            events=read_events(directory.events),
            timeline=read_rows(directory.timeline),
            layout=read_object(directory.layout),
            summary=read_object(directory.summary),
            config=_config(directory.config),
            evaluations=read_evaluations(directory.evaluations),
        )


def _config(path: Path) -> dict[str, Any]:
    try:
        return flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


MOST_EVALUATIONS = 8
"""Evaluations of `slurm-rlhf eval` on a page: the newest."""


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """Read the figures in `folder`, {"title", "eval", "datasets"}; skip files that are incomplete.

    Next to it are those of a directory of `slurm-rlhf eval` alone, which has no other title.
    """
    steps = sorted(folder.glob("step_*.json"))
    others = sorted(folder.glob(f"*/{EVALUATED}"), key=lambda path: path.stat().st_mtime)[-MOST_EVALUATIONS:]
    titled = [*((path, _step(path)) for path in steps[-1:]), *((path, path.parent.name) for path in others)]
    titled.append((folder.parent / EVALUATED, ""))
    found = [(title, _figures(path)) for path, title in titled]
    return [{"title": title, **figures} for title, figures in found if figures is not None]


def _step(path: Path) -> str:
    return f"step {int(path.stem.removeprefix('step_'))}" if path.stem[5:].isdigit() else path.stem


def _figures(path: Path) -> dict[str, Any] | None:
    found = read_object(path)
    return {"eval": found.get("eval"), "datasets": found["datasets"]} if "datasets" in found else None

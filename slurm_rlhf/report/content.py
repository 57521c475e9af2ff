"""Put together what a page shows: one JSON document, from the files of one run or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slurm_rlhf import __version__
from slurm_rlhf.observe.samples import Sample
from slurm_rlhf.report.curves import curves, latest, step_times
from slurm_rlhf.report.history import requeues, restarts, sessions, shown
from slurm_rlhf.report.nodes import nodes, weight_sync
from slurm_rlhf.report.run_files import RunFiles
from slurm_rlhf.report.settings import groups, settings
from slurm_rlhf.report.timeline import role_times, timeline

CHARACTERS = 6000
"""Of a prompt or a response; tokens beyond them are left out, too."""


def content(runs: Sequence[RunFiles], now: float) -> dict[str, Any]:
    """Return what the page needs to know of the runs; `now`: a Unix time."""
    configs = [run.config for run in runs]
    names = distinct([run.name for run in runs], [run.root for run in runs])
    return {
        "made": now,
        "version": __version__,
        "runs": [run_content(run, now) | {"name": name} for run, name in zip(runs, names, strict=True)],
        "groups": groups(configs),
        "settings": settings(configs),
    }


def run_content(run: RunFiles, now: float) -> dict[str, Any]:
    """Return what the page needs to know of one run."""
    return {
        "root": run.root,
        "summary": run.summary,
        "curves": curves(run.rows),
        "times": step_times(run.rows),
        "role_times": role_times(run.timeline),
        "timeline": timeline(run.timeline, run.layout),
        "nodes": nodes(run.layout, run.rows),
        "sync": weight_sync(run.layout, run.rows),
        "evaluations": run.evaluations,
        "samples": [short(sample) for sample in run.samples],
        "samples_of": run.samples_of,
        "events": [asdict(event) for event in shown(run.events)],
        "sessions": sessions(run.events, now, run.summary.get("status") == "running"),
        "requeues": requeues(run.events),
        "restarts": restarts(run.events),
        "tokens_per_s": latest(run.rows, "perf/tokens_per_s"),
        "gpu_idle": latest(run.rows, "perf/gpu_idle"),
        "mfu": latest(run.rows, "perf/mfu"),
    }


def short(sample: Sample) -> dict[str, Any]:
    """Return a sample for the page: numbers to three digits, and no more text than somebody reads."""
    found = asdict(sample)
    for name in ("prompt", "response"):
        text = found[name]
        found[name] = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} ... ({len(text)} characters)"
    count = tokens_within(sample.tokens, CHARACTERS)
    found["tokens"] = sample.tokens[:count]
    for name in ("logprobs", "actor_logprobs"):
        found[name] = [None if value is None else round(value, 3) for value in found[name][:count]]
    return found


def tokens_within(tokens: Sequence[str], most: int) -> int:
    """Count the tokens that are at most `most` characters together."""
    total = 0
    for count, token in enumerate(tokens):
        total += len(token)
        if total > most:
            return count
    return len(tokens)


def distinct(names: Sequence[str], roots: Sequence[str]) -> list[str]:
    """Return names that tell the runs apart: those of the directories, else with as much of the path as it takes."""
    for depth in range(1, 1 + max((root.count("/") for root in roots), default=0)):
        found = ["/".join(root.rsplit("/", depth)[1:]) for root in roots]
        if len(set(found)) == len(found):
            return found
    return [f"{name} ({place + 1})" for place, name in enumerate(names)]

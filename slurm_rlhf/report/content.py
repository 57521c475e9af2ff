"""Put together what a page shows: one JSON document, from the files and settings of one run or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slurm_rlhf import __version__
from slurm_rlhf.config.correction import GROUP, correction_of
from slurm_rlhf.config.keys import all_keys, documentation, put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import cut
from slurm_rlhf.observe.samples import Sample
from slurm_rlhf.report.curves import curves, latest, step_times
from slurm_rlhf.report.nodes import nodes, weight_sync
from slurm_rlhf.report.run_files import RunFiles
from slurm_rlhf.report.timeline import requeues, restarts, role_times, sessions, shown, timeline

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
        "corrected": corrected(run.config),
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


def corrected(config: dict[str, Any]) -> bool:
    """Tell whether the losses of a run with these keys were weighed by algo.correction."""
    made = Config()
    for name in all_keys().keys() & config.keys():
        if name == "vllm.sync_mode" or name.startswith(f"{GROUP}."):
            put(made, name, config[name])
    return correction_of(made) is not None or bool(made.algo.correction.off_policy_delta)


def short(sample: Sample) -> dict[str, Any]:
    """Return a sample for the page: numbers to three digits, and no more text than somebody reads."""
    found = asdict(sample)
    for name in ("prompt", "response"):
        text = found[name]
        found[name] = cut(text, CHARACTERS)
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


OWN = ("run_dir", "train.seed", "resume")
"""Keys in which runs of one experiment differ."""


def settings(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each key, {"key", "default", "values", "changed", "differs", "about"}; `values`: of each run.

    Keys of another version of the package are shown without a default. Relative paths have become absolute ones in a
    run's config.toml, so a path counts as changed where it is set.
    """
    known = all_keys()
    names = [*known, *sorted({name for config in configs for name in config} - known.keys())]
    found = []
    for name in names:
        values = [_shown(config.get(name)) for config in configs]
        default = _shown(known[name].default) if name in known else None
        found.append(
            {
                **{"key": name, "default": default, "values": values},
                "changed": any(value is not None and value != default for value in values),
                "differs": len(set(map(repr, values))) > 1,
                "about": documentation().get(name, ""),
            }
        )
    return found


def groups(configs: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the places of runs that are alike but for their seeds and directories, group by group."""
    found: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        alike = repr(sorted((name, value) for name, value in config.items() if name not in OWN))
        found.setdefault(alike if config else str(place), []).append(place)
    return list(found.values())


def _shown(value: Any) -> Any:
    """Write a value as TOML has it; None: there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) if value else ""
    return (
        value if value is None or isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )

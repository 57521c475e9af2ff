"""Make the page of runs, or of data as a model will see it: one HTML file, without other files or a network.

Missing and half-written parts of a run directory are left out, so that any run can have a report.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from slurm_rlhf import __version__
from slurm_rlhf.config.keys import all_keys, documentation, put
from slurm_rlhf.config.pipeline import EVALUATED
from slurm_rlhf.config.rules import GROUP, correction_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import stored_keys
from slurm_rlhf.errors import cut
from slurm_rlhf.observe import run_log
from slurm_rlhf.report import pictures
from slurm_rlhf.run_directory import RunDirectory, write_atomically

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
    samples: list[run_log.Sample]  # some of samples.jsonl, chosen by `shown_places`
    samples_of: int  # number of samples in the file
    events: list[run_log.RunEvent]
    timeline: list[dict[str, Any]]  # as `StepSpans.line` returns them
    layout: dict[str, Any]
    summary: dict[str, Any]
    config: dict[str, Any]  # dotted key -> value
    evaluations: list[dict[str, Any]]  # as `read_evaluations` returns them

    @classmethod
    def read(cls, directory: RunDirectory) -> RunFiles:
        """Read all files of a run."""
        root, samples_of = directory.root.absolute(), run_log.count_lines(directory.samples)
        return cls(
            name=root.name,
            root=str(root),
            rows=run_log.read_rows(directory.metrics),
            samples=run_log.read_samples(directory.samples, set(shown_places(samples_of))),
            samples_of=samples_of,
            events=run_log.read_events(directory.events),
            timeline=run_log.read_rows(directory.timeline),
            layout=run_log.read_object(directory.layout),
            summary=run_log.read_object(directory.summary),
            config=stored_keys(directory.config),
            evaluations=read_evaluations(directory.evaluations),
        )


MOST_EVALUATIONS = 8
"""Evaluations of `slurm-rlhf eval` on a page: the newest."""


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """Read the figures in `folder`, {"title", "eval", "datasets"}; skip files that are incomplete.

    In a directory of `slurm-rlhf eval` itself the figures are next to `folder`; their title is empty.
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
    found = run_log.read_object(path)
    return {"eval": found.get("eval"), "datasets": found["datasets"]} if "datasets" in found else None


CHARACTERS = 6000
"""Most characters of a prompt or a response; tokens beyond them are left out."""


def content(runs: Sequence[RunFiles], now: float) -> dict[str, Any]:
    """Return the data of the page of some runs; `now` is a Unix time."""
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
    """Return the data of the page about one run."""
    return {
        "root": run.root,
        "summary": run.summary,
        "curves": pictures.curves(run.rows),
        "corrected": corrected(run.config),
        "times": pictures.step_times(run.rows),
        "role_times": pictures.role_times(run.timeline),
        "timeline": pictures.timeline(run.timeline, run.layout),
        "nodes": pictures.nodes(run.layout, run.rows),
        "sync": pictures.weight_sync(run.layout, run.rows),
        "evaluations": run.evaluations,
        "samples": [short(sample) for sample in run.samples],
        "samples_of": run.samples_of,
        "events": [asdict(event) for event in pictures.shown(run.events)],
        "sessions": pictures.sessions(run.events, now, run.summary.get("status") == "running"),
        "requeues": sum(event.event == run_log.REQUEUE for event in run.events),
        "restarts": sum(event.event == run_log.RESTART for event in run.events),
        **{name: pictures.latest(run.rows, f"perf/{name}") for name in ("tokens_per_s", "gpu_idle", "mfu")},
    }


def corrected(config: dict[str, Any]) -> bool:
    """Tell whether algo.correction has weighted the losses of a run with these keys."""
    made = Config()
    for name in all_keys().keys() & config.keys():
        if name == "vllm.sync_mode" or name.startswith(f"{GROUP}."):
            put(made, name, config[name])
    return correction_of(made) is not None or bool(made.algo.correction.off_policy_delta)


def short(sample: run_log.Sample) -> dict[str, Any]:
    """Return a sample for the page: with rounded numbers and shortened texts."""
    found = asdict(sample)
    found |= {name: cut(found[name], CHARACTERS) for name in ("prompt", "response")}
    count = tokens_within(sample.tokens, CHARACTERS)
    found["tokens"] = sample.tokens[:count]
    for name in ("logprobs", "actor_logprobs"):
        found[name] = [None if value is None else round(value, 3) for value in found[name][:count]]
    return found


def tokens_within(tokens: Sequence[str], most: int) -> int:
    """Return how many tokens from the first on have at most `most` characters together."""
    return sum(total <= most for total in accumulate(map(len, tokens)))


def distinct(names: Sequence[str], roots: Sequence[str]) -> list[str]:
    """Return different names for the runs: those of the directories, if necessary with more of their paths."""
    for depth in range(1, 1 + max((root.count("/") for root in roots), default=0)):
        found = ["/".join(root.rsplit("/", depth)[1:]) for root in roots]
        if len(set(found)) == len(found):
            return found
    return [f"{name} ({place + 1})" for place, name in enumerate(names)]


OWN = ("run_dir", "train.seed", "resume")
"""Keys in which runs of one experiment may differ."""


def settings(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each key, {"key", "default", "values", "changed", "differs", "about"}, with a value per run.

    Keys of another version of the package have no default. Paths are absolute in the config.toml of a run, so a path
    counts as changed if it is set.
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
    """Group the runs (by their indices) whose configurations differ in nothing but `OWN`."""
    found: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        alike = repr(sorted((name, value) for name, value in config.items() if name not in OWN))
        found.setdefault(alike if config else str(place), []).append(place)
    return list(found.values())


def _shown(value: Any) -> Any:
    """Format a value as in TOML; None stays None."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) if value else ""
    return (
        value if value is None or isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )


_PART = re.compile(r"/\*(\w+\.(?:css|js))\*/")
"""Mark in page.html where a file of its directory goes; each script uses those before it."""


def page(content: dict[str, Any]) -> str:
    """Return the page that shows `content`."""
    before, _, after = _template("page.html").partition("/*DATA*/")
    return before + embedded(content) + after


def _template(name: str) -> str:
    folder = files("slurm_rlhf.report") / "page"
    html = (folder / name).read_text(encoding="utf-8")
    return _PART.sub(lambda mark: (folder / mark[1]).read_text(encoding="utf-8"), html)


def embedded(content: dict[str, Any]) -> str:
    """Write JSON for a <script> element: no text in it can end the element."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def write_page(path: Path, runs: Sequence[RunDirectory]) -> None:
    """Write a page that shows `runs` into a file. Raises OSError; then an earlier page stays as it is."""
    text = page(content([RunFiles.read(run) for run in runs], time.time()))
    # A text may have lone surrogates, which UTF-8 cannot encode.
    write_atomically(path, text.encode("utf-8", "replace").decode())


BINS = 12
"""Most bars of a histogram."""


@dataclass(frozen=True, slots=True)
class ShownRow:
    """Holds the tokens of a sequence as the model sees them."""

    title: str
    tokens: list[str]
    loss: list[bool]  # whether the loss counts the token
    length: int  # tokens, also those that are left out here


@dataclass(slots=True)
class DataView:
    """Describes one data set for the page of `slurm-rlhf data`."""

    key: str  # dotted key of the configuration
    path: str
    lengths: list[int]  # tokens of each sequence that is kept
    facts: list[str] = field(default_factory=list)  # lines about the whole: counts, duplicates
    dropped: list[str] = field(default_factory=list)  # a line for each reason or row
    rows: list[ShownRow] = field(default_factory=list)


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Count the lengths in bars of equal width: (shortest, longest, how many) of each."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // BINS)
    counts = Counter((length - low) // width for length in lengths)
    return [
        (low + place * width, low + (place + 1) * width - 1, counts[place])
        for place in range((high - low) // width + 1)
    ]


def write_data_page(path: Path, views: Sequence[DataView]) -> None:
    """Write the page into a file. Raises OSError."""
    text = _template("data.html").replace("<!--BODY-->", "\n".join(map(_section, views)))
    write_atomically(path, text.encode("utf-8", "replace").decode())  # a text may have lone surrogates


def _section(view: DataView) -> str:
    most = max((count for *_, count in histogram(view.lengths)), default=1)
    bars = "".join(
        f"<tr><td>{low if low == high else f'{low} to {high}'}</td><td>{count}</td>"
        f'<td><div class="bar" style="width:{count / most:.1%}"></div></td></tr>'
        for low, high, count in histogram(view.lengths)
    )
    facts = "".join(f"<li>{escape(line)}</li>" for line in view.facts)
    dropped = "".join(f"<li>{escape(line)}</li>" for line in view.dropped) or "<li>none</li>"
    rows = "".join(map(_row, view.rows))
    return (
        f'<section><h2>{escape(view.key)}</h2><p class="soft">{escape(view.path)}</p><div class="wide">'
        f'<div class="card"><h3>The whole</h3><ul>{facts}</ul><h3>Left out</h3><ul>{dropped}</ul></div>'
        f'<div class="card"><h3>Tokens of a sequence</h3><table class="lengths">{bars}</table></div></div>'
        f"{rows}</section>"
    )


def _row(row: ShownRow) -> str:
    tokens = "".join(
        f'<span class="{"loss" if loss else "none"}">{escape(token)}</span>'
        for token, loss in zip(row.tokens, row.loss, strict=True)
    )
    left = row.length - len(row.tokens)
    more = f'<p class="soft">and {left} more tokens</p>' if left else ""
    return f'<div class="card tokens"><h3>{escape(row.title)}</h3><pre>{tokens}</pre>{more}</div>'

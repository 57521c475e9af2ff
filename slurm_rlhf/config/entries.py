"""Read and check the entries of eval.datasets, with all settings and metrics, and those of reward.sources."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import entry_table
from slurm_rlhf.config.ranges import URLS
from slurm_rlhf.config.rules import row_problems
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.config.schema_jobs import EvalDataSet
from slurm_rlhf.config.schema_models import RewardPart
from slurm_rlhf.errors import meant

MEAN = "eval"
"""The metric that averages over data sets."""
_NAME = re.compile(r"[A-Za-z0-9_.@+-]+")


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Describes one data set of an evaluation, with nothing left to inherit."""

    name: str
    path: str
    n_samples_per_prompt: int
    temperature: float  # 0: greedy
    max_samples: int  # rows; 0: all
    pass_k: tuple[int, ...]
    pass_score: float
    answer_pattern: str
    source_key: str  # empty: none
    input_key: str
    label_key: str
    needs_label: bool  # the data set names the column itself

    def reading(self, data: Data) -> Data:
        """Return the keys with which its file is read: every row of it, by its own columns."""
        return replace(data, input_key=self.input_key, label_key=self.label_key, weights=[], filter=[])


def data_sets(config: Config) -> list[EvalSettings]:
    """List the data sets of eval.datasets, or that of eval.dataset; empty: nothing is evaluated."""
    entries = config.eval.datasets or ([EvalDataSet(config.eval.dataset)] if config.eval.dataset else [])
    return [_settled(entry, config) for entry in entries]


def default_pass_k(samples: int) -> tuple[int, ...]:
    """List the k of pass@k where nobody has named them: 1, 2, 4, ... and the number of responses itself."""
    return tuple(sorted({*(2**exponent for exponent in range(samples.bit_length())), samples}))


def metric_names(config: Config) -> list[str]:
    """List the metrics of an evaluation of which more is better: those that ckpt.best_metric may name."""
    names = []
    for one in data_sets(config):
        figures = ["mean", *(f"pass@{k}" for k in one.pass_k)]
        if one.n_samples_per_prompt > 1:
            figures.append(f"maj@{one.n_samples_per_prompt}")
        names += [f"eval/{one.name}/{figure}" for figure in figures]
    return [MEAN, *names] if names else []


def eval_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of eval, and of ckpt.best_metric; wait until each number is in its range."""
    group = config.eval
    if group.dataset and group.datasets:
        yield "eval.dataset and eval.datasets are both set: put the one file into the list, or leave it out"
        return
    if not data_sets(config):
        yield from row_problems("no_data", config)
        return
    found = [problem for one in data_sets(config) for problem in _set_problems(config, one)]
    names = [one.name for one in data_sets(config)]
    found += [
        f"eval.datasets: two data sets are called {name!r}: give each its own name, by which metrics and reports tell "
        "them apart"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    yield from found
    if not found:
        yield from _best(config)
    yield from row_problems("overlap", config)


def _settled(entry: EvalDataSet, config: Config) -> EvalSettings:
    names = (field.name for field in fields(entry))
    values: dict[str, Any] = {name: getattr(config.eval, name) for name in names if hasattr(config.eval, name)}
    values |= {"input_key": config.data.input_key, "label_key": config.data.label_key} | entry_table(entry)
    values["name"] = entry.name or re.sub(r"[^A-Za-z0-9_.@+-]", "_", Path(entry.path).stem) or "eval"
    values["pass_k"] = tuple(values["pass_k"]) or default_pass_k(values["n_samples_per_prompt"])
    return EvalSettings(**values, needs_label=entry.label_key is not None)


def _best(config: Config) -> Iterator[str]:
    name, valid = config.ckpt.best_metric, metric_names(config)
    if name and name not in valid:
        unknown = f"ckpt.best_metric = {name!r} is no metric of this evaluation{meant(name, valid)}"
        yield f"{unknown} (valid: {', '.join(valid)})"


def _set_problems(config: Config, one: EvalSettings) -> Iterator[str]:
    """Find the broken rules of one data set."""
    where = f"eval.datasets, {one.name}: " if config.eval.datasets else "eval."
    name, pattern = bool(_NAME.fullmatch(one.name)), _wrong_pattern(one.answer_pattern)
    yield from row_problems("data_set", config, one=one, where=where, plain_name=name, wrong_pattern=pattern)
    for k in one.pass_k:
        if not 1 <= k <= one.n_samples_per_prompt:
            yield (
                f"{where}pass_k has {k}, and pass@{k} needs k from 1 to n_samples_per_prompt = "
                f"{one.n_samples_per_prompt}: ask for more samples, or leave it out"
            )


def _wrong_pattern(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"is not a regular expression: {error}"
    return f"has {groups} groups, and one is the answer: write the others as (?:...)" if groups > 1 else ""


ENVIRONMENT, BESIDE = "environment", "source"
"""Components of the reward where env.path has another source beside it: the environment's, and that of a source that
is no entry of reward.sources."""
SOURCES = ("remote_url", "function", "preset", "model")
PRESET_LIBRARIES = {
    "math": ("math_verify", "math-verify"),
    "json_schema": ("jsonschema", "jsonschema"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Preset -> the module that it imports, and the package."""


def runs_programs(config: Config) -> bool:
    """Tell whether a reward of the run is by unit tests, in a sandbox."""
    return "code" in (config.reward.preset, *(part.preset for part in config.reward.sources))


def in_workers(config: Config) -> dict[str, str]:
    """Return what runs in workers: key -> the file or the name of a reward function, preset or environment."""
    reward, found = config.reward, {"env.path": config.env.path}
    for part in [reward, *reward.sources] if reward.workers else ():
        where = f"reward.sources, {part.name}, " if isinstance(part, RewardPart) else "reward."
        found |= {f"{where}{key}": getattr(part, key) for key in ("remote_url", "function", "preset")}
    return {key: value for key, value in found.items() if value and not value.startswith(URLS)}


def part_problems(config: Config) -> Iterator[str]:
    """Check the entries and what is beside them."""
    reward = config.reward
    names = [part.name for part in reward.sources]
    for name, count in Counter(names).items():
        if name == ENVIRONMENT and config.env.path:
            yield f"reward.sources: the name {name!r} is that of the rewards of env.path: choose another"
        if count > 1 or not _NAME.fullmatch(name):
            yield (
                f"reward.sources: the name {name!r} is "
                f"{'there twice' if count > 1 else 'empty or has other characters than letters, digits and _.@+-'}: "
                "each entry needs its own, by which metrics call it"
            )
    for part in reward.sources:
        named = [source for source in SOURCES if getattr(part, source)]
        if len(named) != 1:
            given = " and ".join(named) or "no source"
            yield f"reward.sources, {part.name}: {given} is set: give each entry one of {', '.join(SOURCES)}"
    for key in ("remote_url", "function", "preset"):
        if getattr(reward, key):
            yield f"reward.{key} and reward.sources are both set: make it an entry of reward.sources, or leave one out"
    models = sum(part.model for part in reward.sources)
    if models != bool(reward.model_name_or_path):
        yield (
            f"reward.sources has {models} entries with model = true, and reward.model_name_or_path = "
            f"{reward.model_name_or_path!r}: one entry belongs to one directory of a reward model"
        )


def settings_of(part: RewardPart) -> dict[str, Any]:
    """Return the keys of `reward` for a source that is this entry alone."""
    found = {f"reward.{name}": getattr(part, name) for name in ("remote_url", "function", "preset", "preset_value")}
    return {**found, "reward.sources": [], "reward.model_name_or_path": ""}


def preset(config: Config) -> Iterator[str]:
    """Check the preset of the reward: what it needs, and what it takes."""
    name, value = config.reward.preset, config.reward.preset_value
    module, package = PRESET_LIBRARIES.get(name, ("", ""))
    if module and find_spec(module) is None:
        yield f"reward.preset = {name} needs {package}, which is not installed: pip install 'slurm_rlhf[rewards]'"
    if name in ("regex", "json_schema", "length") and not value:
        yield f"reward.preset_value is empty: reward.preset = {name} needs it; slurm-rlhf docs rewards says what for"
    if value and name in ("", "math", "exact"):
        yield f"reward.preset_value = {value} has no effect with reward.preset = {name or 'empty'}: leave it out"

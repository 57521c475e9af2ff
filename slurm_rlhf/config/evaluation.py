"""Describe what an evaluation evaluates: data sets as written and with all settings, their metrics and problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import entry_table
from slurm_rlhf.config.rule import row_problems
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.config.schema_jobs import EvalDataSet
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
    needs_label: bool  # its own entry names label_key, so rows without that column are an error

    def reading(self, data: Data) -> Data:
        """Return `data` as this data set is read: every row, by its own columns."""
        return replace(data, input_key=self.input_key, label_key=self.label_key, weights=[], filter=[])


def data_sets(config: Config) -> list[EvalSettings]:
    """List the data sets of eval.datasets, or that of eval.dataset; empty: nothing is evaluated."""
    entries = config.eval.datasets or ([EvalDataSet(config.eval.dataset)] if config.eval.dataset else [])
    return [_settled(entry, config) for entry in entries]


def default_pass_k(samples: int) -> tuple[int, ...]:
    """List the k of pass@k where nobody has named them: 1, 2, 4, ... and the number of responses itself."""
    return tuple(sorted({*(2**exponent for exponent in range(samples.bit_length())), samples}))


def metric_names(config: Config) -> list[str]:
    """List the metrics of an evaluation for which higher is better: ckpt.best_metric may name them."""
    names = []
    for one in data_sets(config):
        figures = ["mean", *(f"pass@{k}" for k in one.pass_k)]
        if one.n_samples_per_prompt > 1:
            figures.append(f"maj@{one.n_samples_per_prompt}")
        names += [f"eval/{one.name}/{figure}" for figure in figures]
    return [MEAN, *names] if names else []


def eval_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of eval, and of ckpt.best_metric; ranges of numbers are checked elsewhere."""
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
    name, valid = config.ckpt.best_metric, metric_names(config)
    if not found and name and name not in valid:
        unknown = f"ckpt.best_metric = {name!r} is no metric of this evaluation{meant(name, valid)}"
        yield f"{unknown} (valid: {', '.join(valid)})"
    yield from row_problems("overlap", config)


def _settled(entry: EvalDataSet, config: Config) -> EvalSettings:
    names = (field.name for field in fields(entry))
    values: dict[str, Any] = {name: getattr(config.eval, name) for name in names if hasattr(config.eval, name)}
    values |= {"input_key": config.data.input_key, "label_key": config.data.label_key} | entry_table(entry)
    values["name"] = entry.name or re.sub(r"[^A-Za-z0-9_.@+-]", "_", Path(entry.path).stem) or "eval"
    values["pass_k"] = tuple(values["pass_k"]) or default_pass_k(values["n_samples_per_prompt"])
    return EvalSettings(**values, needs_label=entry.label_key is not None)


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

"""Evaluate the rules over keys that are rows of `rules.toml`."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.reward_sources import in_workers, runs_programs
from slurm_rlhf.config.roles import has_engines, has_teacher
from slurm_rlhf.config.schema import Config

SIGNS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""Signs of conditions, of rules and of data.filter."""


def facts(config: Config) -> dict[str, Any]:
    """Return the values that conditions and sentences may name: groups of keys, and facts that follow from keys."""
    return {field.name: getattr(config, field.name) for field in fields(config)} | {
        "checkpointing": config.checkpointing,
        "engines": has_engines(config),
        "programs": runs_programs(config),
        "teacher": has_teacher(config),
        "turns": config.train.colocate_all and has_engines(config),  # roles and engines share GPUs and take turns
        "workers": in_workers(config),
    }


def row_problems(group: str, config: Config, **values: Any) -> Iterator[str]:
    """Find the broken rules among the rows of a group; `values` are further facts."""
    known = facts(config) | values
    for row in _rows()[group]:
        if any(all(_holds(each, known) for each in way.split(" and ")) for way in row["when"].split(" or ")):
            sentence = row["says"].format_map(known)
            yield from where_set(config, row["set"], sentence) if "set" in row else [sentence]


def _holds(condition: str, known: Mapping[str, Any]) -> bool:
    """Tell whether a condition is true: `NAME`, `not NAME`, or a comparison with a value or another name."""
    name, *compared = condition.removeprefix("not ").split(" ")
    value = _named(name, known)
    if not compared:
        return bool(value) != condition.startswith("not ")
    sign, text = compared
    first, dot, _ = text.partition(".")
    if first in known and (dot or not isinstance(value, str)):
        return bool(SIGNS[sign](value, _named(text, known)))
    return bool(SIGNS[sign](value, text if isinstance(value, str) else float(text)))


def _named(name: str, known: Mapping[str, Any]) -> Any:
    value, _ = Formatter().get_field(name, (), known)
    return len(value) if isinstance(value, list) else value


def where_set(config: Config, names: Iterable[str], says: str) -> Iterator[str]:
    """Yield `KEY = VALUE {says}` for each of the keys `names` that is not at its default."""
    for name in names:
        value = get(config, name)
        if value != all_keys()[name].default:
            shown = f"{value:g}" if isinstance(value, float) else str(value).lower() if value is True else value
            yield f"{name} = {shown} {says}"


@cache
def _rows() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))

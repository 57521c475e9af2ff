"""Read the rules over keys: rows of `rules.toml`, and methods of classes, whose docstring is the sentence to say."""

from __future__ import annotations

import ast
import operator
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache, reduce
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.reward_sources import in_workers, runs_programs
from slurm_rlhf.config.roles import has_engines, has_teacher
from slurm_rlhf.config.schema import Config

_SIGNS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Broken = bool | dict[str, Any] | list[dict[str, Any]]
"""A method's answer: whether its rule is broken, or the values that its sentence names in {braces}, once for each time.
"""


def facts(config: Config) -> dict[str, Any]:
    """Return what conditions and sentences may name: the groups of keys, and what several keys say together."""
    return {field.name: getattr(config, field.name) for field in fields(config)} | {
        "checkpointing": config.checkpointing,
        "engines": has_engines(config),
        "programs": runs_programs(config),
        "teacher": has_teacher(config),
        "turns": in_turns(config),
        "workers": in_workers(config),
    }


def in_turns(config: Config) -> bool:
    """Tell whether engines and trainers take turns on the same accelerators."""
    return config.train.colocate_all and has_engines(config)


def row_problems(group: str, config: Config, **values: Any) -> Iterator[str]:
    """Find the broken rules among the rows of a group; `values` are further facts."""
    known = facts(config) | values
    for row in _rows().get(group, ()):
        if any(all(_holds(each, known) for each in way.split(" and ")) for way in row["when"].split(" or ")):
            sentence = row["says"].format_map(known)
            yield from without_effect(config, row["unused"], sentence) if "unused" in row else [sentence]


def _holds(condition: str, known: Mapping[str, Any]) -> bool:
    """Tell whether a condition is true: `NAME`, `not NAME`, or a comparison with a value or another name."""
    name, *compared = condition.removeprefix("not ").split(" ")
    value = _named(name, known)
    if not compared:
        return bool(value) != condition.startswith("not ")
    sign, text = compared
    if isinstance(value, str):
        return bool(_SIGNS[sign](value, text))
    return bool(_SIGNS[sign](value, _named(text, known) if text.partition(".")[0] in known else float(text)))


def _named(name: str, known: Mapping[str, Any]) -> Any:
    first, *rest = name.split(".")
    return reduce(getattr, rest, known[first])


def without_effect(config: Config, names: Iterable[str], why: str) -> Iterator[str]:
    """Find those of the keys `names` that were set although they have no effect; `why` goes on: `with x = y: ...`."""
    for name in names:
        value = get(config, name)
        if value != all_keys()[name].default:
            yield f"{name} = {f'{value:g}' if isinstance(value, float) else value} has no effect {why}"


class Rules:
    """Rules over keys: the rows of a group, and a rule for each public method, whose docstring is the sentence.

    The sentence may name facts, `values`, and the values that the method returns.
    """

    group = ""

    def __init__(self, config: Config, **values: Any) -> None:
        self.config = config
        self._values = values

    def problems(self) -> Iterator[str]:
        """Find the broken rules: rows, then methods in the order in which they are written."""
        yield from row_problems(self.group, self.config, **self._values)
        known = facts(self.config) | self._values
        for name, sentence in _sentences(type(self).__module__, type(self).__name__).items():
            found: Broken = getattr(self, name)()
            for more in found if isinstance(found, list) else [found] if found else []:
                yield sentence.format_map(known | (more if isinstance(more, dict) else {}))


@cache
def _rows() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


@cache
def _sentences(module: str, rules: str) -> dict[str, str]:
    """Return each rule's docstring; read from the source, since PYTHONOPTIMIZE=2 leaves docstrings out."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == rules)
    methods = [node for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {method.name: " ".join((ast.get_docstring(method) or "").split()) for method in methods}

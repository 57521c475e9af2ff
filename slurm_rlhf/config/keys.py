"""Find every key of the schema by its dotted name or by a name that users of OpenRLHF, verl and TRL know.

A key has a type, a range, a default and documentation. A name that is not a key is looked up in `migrate.json`:

    openrlhf           the flags of OpenRLHF's PPO command: `now` is the spelling since April 2026 (`actor.adam.lr`),
                       `before` the one until then (`actor_learning_rate`); `key` is the key here that takes the same
                       value, or `instead` says what to do. Source: `openrlhf/cli/train_ppo_ray.py` of August and April
                       2026.
    unserved           PEFT's fields, as keys or as TRL's flags -> what vLLM's adapters do not have
    short              short name that people write -> the keys they mean, the most likely first

`peers.toml` has the keys here for names of verl and TRL. Their values may differ, so `slurm-rlhf migrate` alone
translates them; an error about such a name only says the key.
"""

from __future__ import annotations

import ast
import copy
import difflib
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from slurm_rlhf.algorithms.registry import KEY as ALGORITHM
from slurm_rlhf.algorithms.registry import built_in
from slurm_rlhf.config.ranges import Range
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import EvalDataSet
from slurm_rlhf.config.schema_models import RewardPart

ENTRIES: dict[str, type[EvalDataSet | RewardPart]] = {"list[dataset]": EvalDataSet, "list[part]": RewardPart}
"""Kind of a key that holds tables -> what a table is."""


@dataclass(frozen=True, slots=True)
class Key:
    """Describe one key; `kind` is str, path, int, float, bool, or list[...] of int, float, str, path or dataset."""

    name: str
    kind: str
    default: Any
    choices: tuple[str, ...] = ()
    allowed: Range | None = None  # range of a number, or of each number of a list
    words: tuple[str, ...] = ()  # words that it takes in place of a number

    @property
    def group(self) -> str:
        """Return the part before the last dot: `algo.kl` of `algo.kl.init_coef`; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def expected(self) -> str:
        """Describe the kind, for error messages."""
        if self.choices:
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        kind = self.kind.removeprefix("list[").removesuffix("]")
        one, several = _EXPECTED[kind]
        return (one if kind == self.kind else f"a list of {several}") + "".join(f" or {word}" for word in self.words)


_EXPECTED = {
    "str": ("a string", "strings"),
    "path": ("a path (a string)", "paths (strings)"),
    "int": ("a whole number", "whole numbers"),
    "float": ("a number", "numbers"),
    "bool": ("true or false", ""),
    "part": ("", "tables with name, weight, clip and a source"),
    "dataset": ("", "paths (strings) and of tables with path, name, n_samples_per_prompt, ..."),
}
"""Kind -> how errors call one value, and several."""


@cache
def all_keys() -> dict[str, Key]:
    """Return all keys by dotted name, in the order of the schema."""
    return {key.name: key for key in _walk(Config(), "")}


def _walk(group: Any, prefix: str) -> Iterable[Key]:
    hints = get_type_hints(type(group), include_extras=True)
    for field in fields(group):
        name, value, hint = prefix + field.name, getattr(group, field.name), hints[field.name]
        if is_dataclass(value):
            yield from _walk(value, name + ".")
        elif get_origin(hint) is Literal:
            yield Key(name, "str", value, get_args(hint))
        elif get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], Range):
            kind, *instead = get_args(hint.__origin__) or (hint.__origin__,)
            kind, words = (kind, get_args(instead[0])) if instead else (hint.__origin__, ())
            yield Key(name, _kind(kind), value, allowed=hint.__metadata__[0], words=words)
        elif get_origin(hint) is Annotated:
            yield Key(name, "path", value)
        elif kinds := [kind for kind, entry in ENTRIES.items() if entry in get_args(hint)]:
            yield Key(name, kinds[0], value)
        elif any(get_origin(item) is Annotated for item in get_args(hint)):
            yield Key(name, "list[path]", value)
        else:
            yield Key(name, _kind(hint), value)


def _kind(hint: Any) -> str:
    """Name a type, without `| None`: users never write None."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).removesuffix(" | None")


def entry_keys(key: Key) -> dict[str, Key]:
    """Return a key for each field of the tables that `key` holds, by its name: `eval.datasets: temperature`."""
    prefix = f"{key.name}: "
    return {inner.name.removeprefix(prefix): inner for inner in _walk(ENTRIES[key.kind](), prefix)}


def entry_table(entry: EvalDataSet | RewardPart) -> dict[str, Any]:
    """Return what a user would write for a table: the fields that are set."""
    empty = type(entry)()
    names = (field.name for field in fields(entry))
    return {name: value for name in names if (value := getattr(entry, name)) != getattr(empty, name)}


@cache
def groups() -> frozenset[str]:
    """Return the dotted names of the groups: `actor`, `algo`, `algo.kl`, ..."""
    names = {key.group for key in all_keys().values()} - {""}
    return frozenset(names | {name.rpartition(".")[0] for name in names if "." in name})


def get(config: Config, name: str) -> Any:
    """Return the value of a dotted key (or a group)."""
    return reduce(getattr, name.split("."), config)


def put(config: Config, name: str, value: Any) -> None:
    """Set a dotted key."""
    group, _, leaf = name.rpartition(".")
    setattr(get(config, group) if group else config, leaf, value)


def changed(config: Config, change: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with other values of the keys in `change`."""
    copied = copy.deepcopy(config)
    for name, value in change.items():
        put(copied, name, value)
    return copied


def changed_keys(config: Config, *beginnings: str) -> list[str]:
    """List the keys that differ from their default; with `beginnings`, only those that start with one of them."""
    keys = [key for name, key in all_keys().items() if name.startswith(beginnings or "")]
    return [key.name for key in keys if get(config, key.name) != key.default]


@cache
def documentation() -> dict[str, str]:
    """Return the docstring under the field of each key, and the class docstring of each group.

    Docstrings of fields exist in the source only, so this parses the files of the schema.
    """
    found: dict[str, str] = {}

    def visit(group: Any, prefix: str) -> None:
        nodes = [_class_nodes(kind.__module__)[kind.__name__] for kind in type(group).__mro__ if is_dataclass(kind)]
        if prefix:
            found[prefix[:-1]] = ast.get_docstring(nodes[0]) or ""
        body = [statement for node in reversed(nodes) for statement in node.body]
        for statement, text in zip(body, [*body[1:], ast.Pass()], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = getattr(group, statement.target.id)
                if is_dataclass(value):
                    visit(value, f"{prefix}{statement.target.id}.")
                elif isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[prefix + statement.target.id] = " ".join(str(text.value.value).split())

    visit(Config(), "")
    found[ALGORITHM] = found[ALGORITHM].format(algorithms=", ".join(sorted(built_in())))
    return found


@cache
def _class_nodes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def nearest(name: str) -> list[str]:
    """List valid keys that a user who wrote `name` may have meant, the most likely first; none if none is near."""
    wanted = name.lower().replace("-", "_")
    leaf = wanted.rpartition(".")[2]
    if known := tables()["short"].get(leaf):
        group = wanted.rpartition(".")[0]
        return sorted(known, key=lambda key: difflib.SequenceMatcher(None, group, key).ratio(), reverse=True)
    grouped = "." in wanted or wanted.partition("_")[0] in groups()
    same_leaf = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
    if same_leaf and leaf == wanted:
        return same_leaf
    whole = difflib.get_close_matches(wanted, all_keys(), n=1, cutoff=0.8) if grouped else []
    if whole or same_leaf:
        return whole or same_leaf
    if grouped and (close := difflib.get_close_matches(wanted, all_keys(), n=1, cutoff=0.7)):
        return close
    leaves = [key.rpartition(".")[2] for key in all_keys()]
    near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return [key for key in all_keys() if key.rpartition(".")[2] in near]


VALUES = {
    "actor.lr_scheduler": {"cosine_with_min_lr": "cosine"},
    "actor.policy_loss_type": {"vanilla": "ppo", "dapo": "ppo", "grpo": "ppo"},
    "ds.packing_samples": {"true": "auto", "false": "never"},
}
"""Key -> a value of OpenRLHF, verl or TRL -> the value here. Errors suggest it; it is not translated silently."""

INTERVALS = ("ckpt.save_steps", "eval.steps")
"""Keys for which -1 means never in OpenRLHF and verl; here 0 does."""


@cache
def tables() -> dict[str, Any]:
    """Read migrate.json."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("migrate.json").read_text(encoding="utf-8"))
    return found


@cache
def peers() -> dict[str, Any]:
    """Read peers.toml."""
    return tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))


def spellings(flag: dict[str, str]) -> list[str]:
    """List the names of a flag of OpenRLHF, the newer one first."""
    return [flag[age] for age in ("now", "before") if age in flag]


@cache
def read_as() -> dict[str, str]:
    """Return OpenRLHF's spellings that differ from ours: flag -> key."""
    flags = [flag for flag in tables()["openrlhf"] if "key" in flag]
    return {name: flag["key"] for flag in flags for name in spellings(flag) if name != flag["key"]}


def key_of(name: str) -> Key | None:
    """Find the key that `name` is, a key of ours or a flag of OpenRLHF; None: it is neither."""
    return all_keys().get(name) or all_keys().get(read_as().get(name, ""))


@cache
def _instead() -> dict[str, str]:
    flags = [flag for flag in tables()["openrlhf"] if "instead" in flag]
    return {name: flag["instead"] for flag in flags for name in spellings(flag)}


def begins_alias(name: str) -> bool:
    """Return whether `name` is a group of OpenRLHF's that holds keys of ours, as `actor.adam` does."""
    return any(alias.startswith(f"{name}.") for alias in [*read_as(), *_instead()])


def meaning(name: str) -> str:
    """Say which key a name of OpenRLHF, verl, TRL or PEFT is here; empty for others, and where the key ends in it."""
    if name in _instead():
        return f"OpenRLHF's {name} is no key here: {_instead()[name]}"
    if what := tables()["unserved"].get(name):
        remedy = "leave the key out, or train all parameters (lora.rank = 0)"
        return f"vLLM serves no adapters with {what}, so none are trained here: {remedy}"
    for peer in (peers()["verl"], peers()["trl"]):
        key = {**peer["keys"], **peer.get("train", {}).get("keys", {})}.get(name)
        if key and (key.rpartition(".")[2] != name or name in peer["units"]):
            unit = f"; {peer['units'][name]}" if name in peer["units"] else ""
            return f"{peer['name']}'s {name} is {key} here{unit} (`slurm-rlhf train --help {key}` says what it takes)"
    return ""

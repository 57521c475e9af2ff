"""Write keys and their values as text, and read them: TOML, the command line, and the help."""

from __future__ import annotations

import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import (
    ENTRIES,
    VALUES,
    Key,
    all_keys,
    documentation,
    entry_keys,
    entry_table,
    get,
    key_of,
    meaning,
)
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import EvalDataSet
from slurm_rlhf.config.schema_models import RewardPart
from slurm_rlhf.errors import meant


class BadValue(ValueError):
    """Report a value that its key does not take: the key, what it takes and what it got."""

    def __init__(self, key: Key, got: object, message: str = "") -> None:
        """`message` replaces the message that is made from key and value."""
        super().__init__(message or f"{key.name} takes {key.expected}, got {_shown(got)}{_hint(key, got)}")


def from_toml(key: Key, value: Any) -> Any:
    """Check a parsed TOML value against the type of its key; only int is converted, to float.

    Raises BadValue for any other type, for nan and inf, and for a string that is not one of the choices.
    """
    accepted: dict[str, Any] = {"str": str, "path": str, "int": int, "float": (int, float), "bool": bool}
    if key.kind.startswith("list["):
        if not isinstance(value, list):
            raise BadValue(key, value)
        if key.kind in ENTRIES:
            return [_read_entry(key, each) for each in value]
        item = Key(key.name, key.kind[len("list[") : -1], "")
        try:
            return [from_toml(item, each) for each in value]
        except BadValue:
            raise BadValue(key, value) from None
    if (isinstance(value, str) and value in key.words) or (value is None and key.default is None):
        return value
    if not isinstance(value, accepted[key.kind]) or (isinstance(value, bool) and key.kind != "bool"):
        raise BadValue(key, value)
    if key.kind == "float":
        value = float(value)
        if not math.isfinite(value):
            raise BadValue(key, value)
    if isinstance(value, str) and (_SURROGATE.search(value) or (key.choices and value not in key.choices)):
        raise BadValue(key, value)
    return value


def _read_entry(key: Key, value: Any) -> EvalDataSet | RewardPart:
    """Read a table of the list `key`; a data set may be its path alone. Raises BadValue."""
    entry = ENTRIES[key.kind]
    if isinstance(value, entry):
        return value
    if isinstance(value, str) and entry is EvalDataSet:
        value = {"path": value}
    if not isinstance(value, dict):
        raise BadValue(key, value, f"{key.name} takes {key.expected}, got an entry {value!r}")
    known = entry_keys(key)
    for name in value:
        if name not in known:
            near = f"an entry has no {name!r}{meant(name, known)} (valid: {', '.join(known)})"
            raise BadValue(key, value, f"{key.name}: {near}")
    found = entry(**{name: from_toml(known[name], inner) for name, inner in value.items()})
    if found.problem:
        raise BadValue(key, value, f"{key.name}: {found.problem}")
    return found


_SURROGATE = re.compile("[\ud800-\udfff]")
"""Characters that no TOML file can hold: Python puts them for bytes of the command line that are not UTF-8."""
_PLAIN = re.compile(r"\[[\w ,./-]*\]")
"""A list without the quotes that TOML wants, as a shell leaves it."""
_NAMES = ("logger.use", "lora.target_modules")
"""Lists of names, which hold no comma."""
_WORDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("str", "path", "dataset", "part"), str),
    "int": int,
    "float": float,
    "bool": lambda word: {"true": True, "false": False}[word.lower()],
}
"""Kind of a key -> how a word of the command line is read; raises KeyError or ValueError."""


def from_text(key: Key, words: list[str]) -> Any:
    """Convert the words after `--key` (or the one after `--key=`) to the type of the key.

    Strings are taken as they are; `true`/`false` in any case; numbers as Python and TOML write them. Lists are several
    words, one array (plain strings need no quotes), or for numbers and names one word with commas. No word at all turns
    a bool on.
    Raises BadValue.
    """
    if key.kind.startswith("list["):
        return _list_from_words(key, words)
    if not words and key.kind == "bool":
        return True
    if len(words) != 1:
        raise BadValue(key, " ".join(words) if words else None)
    try:
        value = words[0] if words[0] in key.words else _WORDS[key.kind](words[0])
    except (KeyError, ValueError):
        raise BadValue(key, words[0]) from None
    return from_toml(key, value)


def _list_from_words(key: Key, words: list[str]) -> list[Any]:
    if not words:
        raise BadValue(key, None)
    kind, given = key.kind[len("list[") : -1], " ".join(words)
    if len(words) == 1 and words[0].startswith("["):
        try:
            return list(from_toml(key, tomllib.loads(f"list = {given}")["list"]))
        except tomllib.TOMLDecodeError:
            if kind not in ("str", "path") or not _PLAIN.fullmatch(words[0]):
                raise BadValue(key, given) from None
            words = words[0].strip("[] ").replace(",", " ").split()
    elif kind in ("int", "float") or key.name in _NAMES:
        words = [part for word in words for part in word.split(",")]
    try:
        values = [_WORDS[kind](word) for word in words]
    except ValueError:
        raise BadValue(key, given) from None
    return list(from_toml(key, values))


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    return ascii(value) if isinstance(value, str) and _SURROGATE.search(value) else repr(value)


def _hint(key: Key, value: object) -> str:
    if same := VALUES.get(key.name, {}).get(str(value)):
        return f": it is called {same} here"
    if key.kind == "bool" and str(value).lower() in ("true", "false"):
        return ": leave out the quotes"
    if key.kind not in ("int", "float") or isinstance(value, bool) or not isinstance(value, (float, str)):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if key.kind == "int":
        return f": write {int(number)}" if number.is_integer() else ""
    return ": leave out the quotes" if math.isfinite(number) else ""


def split_overrides(words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Split overrides into (key as written, its words), in order, and words that belong to no key.

    Overrides look like `--a.b=c`, `--a.b c`, `--a.flag`, `--a.list 1 2`. A list takes all words up to the next `--`, a
    bool one word if that is true or false, any other key one word. A word that starts with `--` is never a value unless
    written `--a.b=--c`; `-1` is a value.
    """
    found: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or word == "--":
            stray.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if equals:
            found.append((name, [value]))
            continue
        end = next((i for i in range(position, len(words)) if words[i].startswith("--")), len(words))
        following = words[position:end][: _takes(name, words[position : position + 1])]
        position += len(following)
        found.append((name, following))
    return found, stray


def _takes(name: str, first: list[str]) -> int | None:
    key = key_of(name)
    if key is None:
        return None if meaning(name) else 1
    if key.kind == "bool":
        return 1 if first and first[0].lower() in ("true", "false") else 0
    return None if key.kind.startswith("list[") else 1


def dump_toml(config: Config) -> str:
    """Write a TOML file that `load_config` reads back to the same Config: one table per group, in schema order.

    A key that is not set (None) stands in no line, as TOML has no such value.
    """
    lines: list[str] = []
    group = ""
    for key in all_keys().values():
        if key.group != group:
            group = key.group
            lines += ["", f"[{group}]"]
        if (value := get(config, key.name)) is not None:
            lines.append(f"{key.name.rpartition('.')[2]} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted keys."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def stored_keys(path: Path) -> dict[str, Any]:
    """Read the config.toml of a run: dotted key -> value; empty if it is missing or damaged."""
    try:
        return flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def toml_value(value: Any) -> str:
    """Write a value of a key as TOML does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON escapes all characters that TOML wants escaped, except DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, EvalDataSet | RewardPart):
        inner = ", ".join(f"{name} = {toml_value(each)}" for name, each in entry_table(value).items())
        return f"{{ {inner} }}"
    return repr(value)


LEFT = 44  # columns of `--key TYPE` before the text starts


def key_names(only: Collection[str] = (), width: int = 100) -> str:
    """Write the names of keys by group, without their texts. `only` as in `help_text`."""
    names: dict[str, list[str]] = {}
    for key in all_keys().values():
        if listed(key, only):
            names.setdefault(key.group or "run", []).append(key.name.removeprefix(f"{key.group}."))
    groups: dict[tuple[str, ...], list[str]] = {}
    for group, of in names.items():
        groups.setdefault(tuple(of), []).append(group)
    heads = {", ".join(alike): ", ".join(of) for of, alike in groups.items()}
    column = max(map(len, heads)) + 4
    return "".join(
        textwrap.fill(of, width, initial_indent=f"  {head}".ljust(column), subsequent_indent=" " * column) + "\n"
        for head, of in heads.items()
    )


def listed(key: Key, only: Collection[str]) -> bool:
    """Tell whether `only` names the key or a group that it is in; `run` is the group of keys without one."""
    if not key.group and "run" in only:
        return True
    return not only or any(key.name == part or key.name.startswith(f"{part}.") for part in only)


def help_text(only: Collection[str] = (), width: int = 100) -> str:
    """Write keys by group, each with type, docstring and default. `only` names groups or keys (empty: all)."""
    lines: list[str] = []
    group = None
    for key in all_keys().values():
        if not listed(key, only):
            continue
        if key.group != group:
            group = key.group
            about = documentation().get(group, "")
            lines += ["", f"{group or 'run'}:" + (f" {about}" if about else "")]
        lines += _entry(key, max(width, 60))
    return "\n".join(lines[1:]) + "\n"


def _entry(key: Key, width: int) -> list[str]:
    left = f"  --{key.name} {value_text(key)}"
    text = f"{documentation()[key.name]} [{default_text(key)}]"
    if width < LEFT + 46:
        return [left, *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    wrapped = textwrap.wrap(text, width - LEFT, break_on_hyphens=False)
    body = [" " * LEFT + line for line in wrapped]
    if len(left) + 2 > LEFT:
        return [left, *body]
    return [left.ljust(LEFT) + wrapped[0], *body[1:]]


def value_text(key: Key) -> str:
    """Say what a key takes, in a word or as its choices."""
    if key.choices:
        choices = "|".join(choice or '""' for choice in key.choices)
        return choices if len(choices) <= LEFT else "NAME"  # the text says which
    names = {"str": "TEXT", "int": "INT", "float": "NUMBER", "bool": "BOOL", "part": "TABLE"}
    names |= dict.fromkeys(("path", "dataset"), "PATH")
    if key.kind.startswith("list["):
        return f"{names[key.kind[len('list[') : -1]]} ..."
    return "|".join((names[key.kind], *key.words))


def default_text(key: Key) -> str:
    """Write the default as a user would on the command line."""
    value = from_toml(key, key.default)
    if value in ("", [], None):
        return "not set" if value is None else "empty"
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)

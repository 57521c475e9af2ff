"""Values of keys: from TOML, from the command line, checked against the key's type. Strict in both."""

from __future__ import annotations

import math
import tomllib
from typing import Any

from slurm_rlhf.config.keys import Key


class BadValue(ValueError):
    """A value that its key does not take; the message names the key, what it takes and what it got."""

    def __init__(self, key: Key, got: object) -> None:
        super().__init__(f"{key.name} takes {key.expected}, got {_shown(got)}{_hint(key, got)}")


def from_toml(key: Key, value: Any) -> Any:
    """A parsed TOML value as the key's type. Only int -> float is converted.

    Raises BadValue for any other type, for nan and inf, and for a string that is not one of the choices.
    """
    accepted: dict[str, Any] = {"str": str, "path": str, "int": int, "float": (int, float), "bool": bool}
    if key.kind.startswith("list["):
        if not isinstance(value, list):
            raise BadValue(key, value)
        item = Key(key.name, key.kind[len("list[") : -1], None)
        try:
            return [from_toml(item, each) for each in value]
        except BadValue:
            raise BadValue(key, value) from None
    if not isinstance(value, accepted[key.kind]) or (isinstance(value, bool) and key.kind != "bool"):
        raise BadValue(key, value)
    if key.kind == "float":
        value = float(value)
        if not math.isfinite(value):
            raise BadValue(key, value)
    if isinstance(value, str) and (not _is_unicode(value) or (key.choices and value not in key.choices)):
        raise BadValue(key, value)
    return value


def from_text(key: Key, words: list[str]) -> Any:
    """The words after `--key` (or the one after `--key=`) as the key's type.

    Strings are taken as they are; `true`/`false` in any case; numbers as Python and TOML write them. Lists are
    several words, one TOML array, or for numbers one word with commas. No word at all turns a bool on.
    Raises BadValue.
    """
    if key.kind.startswith("list["):
        return _list_from_words(key, words)
    if not words and key.kind == "bool":
        return True
    if len(words) != 1:
        raise BadValue(key, " ".join(words) if words else None)
    word = words[0]
    value: Any = word
    try:
        if key.kind == "bool":
            value = {"true": True, "false": False}[word.lower()]
        elif key.kind in ("int", "float"):
            value = int(word) if key.kind == "int" else float(word)
    except (KeyError, ValueError):
        raise BadValue(key, word) from None
    return from_toml(key, value)


def _list_from_words(key: Key, words: list[str]) -> list[Any]:
    if not words:
        raise BadValue(key, None)
    if len(words) == 1 and words[0].startswith("["):
        try:
            return list(from_toml(key, tomllib.loads(f"list = {words[0]}")["list"]))
        except tomllib.TOMLDecodeError:
            raise BadValue(key, words[0]) from None
    if key.kind in ("list[str]", "list[path]"):
        return list(from_toml(key, words))
    try:
        return list(from_toml(key, [float(part) for word in words for part in word.split(",")]))
    except ValueError:
        raise BadValue(key, " ".join(words)) from None


def _is_unicode(text: str) -> bool:
    """False for what the command line smuggles in as surrogates: no TOML file could hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    return ascii(value) if isinstance(value, str) and not _is_unicode(value) else repr(value)


def _hint(key: Key, value: object) -> str:
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

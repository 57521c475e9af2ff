"""Dotted overrides of the command line: `--a.b=c`, `--a.b c`, `--a.flag`, `--a.list 1 2`."""

from __future__ import annotations

from slurm_rlhf.config.keys import all_keys


def split_overrides(words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(key as written, its words) in order of appearance, and the words that belong to no key.

    Knows the schema only to tell how many words a key takes: a list all up to the next `--`, a bool one if that
    is true or false, any other key one. A word that starts with `--` is never a value unless written `--a.b=--c`;
    `-1` is a value.
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
        following = _following(words, position)[: _takes(name, words[position : position + 1])]
        position += len(following)
        found.append((name, following))
    return found, stray


def _following(words: list[str], start: int) -> list[str]:
    end = next((i for i in range(start, len(words)) if words[i].startswith("--")), len(words))
    return words[start:end]


def _takes(name: str, first: list[str]) -> int | None:
    key = all_keys().get(name)
    if key is not None and key.kind.startswith("list["):
        return None
    if key is not None and key.kind == "bool":
        return 1 if first and first[0].lower() in ("true", "false") else 0
    return 1

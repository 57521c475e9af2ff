"""Write the keys as help text, from the docstrings of the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from slurm_rlhf.config.keys import Key, all_keys, documentation
from slurm_rlhf.config.values import from_toml

LEFT = 44  # columns of `--key TYPE` before the text starts beside it


def help_text(only: Collection[str] = (), width: int = 100) -> str:
    """Write keys by group, each with type, docstring and default. `only` names groups or keys (empty: all)."""
    lines: list[str] = []
    group = None
    for key in all_keys().values():
        if only and not any(key.name == part or key.name.startswith(f"{part}.") for part in only):
            continue
        if key.group != group:
            group = key.group
            about = documentation().get(group, "")
            lines += ["", f"{group or 'run'}:" + (f" {about}" if about else "")]
        lines += _entry(key, max(width, 60))
    return "\n".join(lines[1:]) + "\n"


def _entry(key: Key, width: int) -> list[str]:
    left = f"  --{key.name} {_metavar(key)}"
    text = f"{documentation()[key.name]} [{_default(key)}]"
    if width < LEFT + 46:
        return [left, *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    wrapped = textwrap.wrap(text, width - LEFT, break_on_hyphens=False)
    body = [" " * LEFT + line for line in wrapped]
    if len(left) + 2 > LEFT:
        return [left, *body]
    return [left.ljust(LEFT) + wrapped[0], *body[1:]]


def _metavar(key: Key) -> str:
    if key.choices:
        return "|".join(key.choices)
    names = {"str": "TEXT", "path": "PATH", "int": "INT", "float": "NUMBER", "bool": "BOOL"}
    if key.kind.startswith("list["):
        return f"{names[key.kind[len('list[') : -1]]} ..."
    return names[key.kind]


def _default(key: Key) -> str:
    value = from_toml(key, key.default)
    if value in ("", []):
        return "empty"
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The reference of all keys, written from the schema, so that it cannot differ from it."""

from __future__ import annotations

from slurm_rlhf.config.key_text import default_text, value_text
from slurm_rlhf.config.keys import Key, all_keys, documentation

_HEAD = """# Reference of all keys

You look up a key: its type, its default, what it does. A run is a TOML file with these keys (`[actor]` and below it
`num_nodes = 2`); each can be given on the command line as well (`--actor.num_nodes=2`), which wins.
"""


def key_reference() -> str:
    """Return a Markdown page with a table for each group, in the order of the schema."""
    lines = [*_HEAD.splitlines()]
    group: str | None = None
    for key in all_keys().values():
        if key.group != group:
            group = key.group
            about = documentation().get(group, "")
            lines += ["", f"## {group or 'run'}", "", *([about, ""] if about else [])]
            lines += ["| key | takes | default | |", "|---|---|---|---|"]
        lines.append(_row(key))
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", f"`{value_text(key)}`", f"`{default_text(key)}`", documentation()[key.name])
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

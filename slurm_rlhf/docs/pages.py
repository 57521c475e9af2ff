"""The pages of the documentation: their topics in reading order, their texts, and the reference of all keys."""

from __future__ import annotations

import tomllib
from pathlib import Path

from slurm_rlhf.config.keys import Key, all_keys, documentation
from slurm_rlhf.config.text import default_text, value_text
from slurm_rlhf.errors import ConfigError, meant

_PAGES = Path(__file__).parent
TOPICS: dict[str, str] = tomllib.loads((_PAGES / "topics.toml").read_text(encoding="utf-8"))
"""Topic -> what the reader gets, in reading order."""


def page(topic: str) -> str:
    """Return the Markdown of a page. Raises ConfigError for a topic that is not there, naming the nearest."""
    if topic not in TOPICS:
        raise ConfigError(f"there is no page {topic!r}{meant(topic, TOPICS)} (pages: {', '.join(TOPICS)})")
    if topic == "keys":
        return key_reference()
    return (_PAGES / f"{topic}.md").read_text(encoding="utf-8")


def contents() -> str:
    """Return the list of pages, a line each."""
    width = max(map(len, TOPICS))
    return "\n".join(f"  {topic.ljust(width)}  {about}" for topic, about in TOPICS.items())


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

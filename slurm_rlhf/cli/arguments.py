"""What all commands share: FILE.toml, overrides, flags, the layout of a help page."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.config.help import help_text
from slurm_rlhf.errors import ConfigError

WIDEST = 120


@dataclass(frozen=True, slots=True)
class Arguments:
    """The words of a command, sorted."""

    file: Path
    overrides: list[str]
    flags: frozenset[str]


def parse(words: list[str], usage: str, flags: Collection[str] = ()) -> Arguments:
    """FILE.toml, overrides, and the command's own `flags` anywhere (written with `_` or `-`).

    Raises ConfigError with the usage when the file is missing.
    """
    spelled = {spelling: flag for flag in flags for spelling in (f"--{flag}", f"--{flag.replace('_', '-')}")}
    rest = [word for word in words if word not in spelled]
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the TOML file comes first\n{usage}")
    return Arguments(Path(rest[0]), rest[1:], frozenset(spelled[word] for word in words if word in spelled))


def page(usage: str, about: str, only: Collection[str] = (), flags: Mapping[str, str] | None = None) -> str:
    """A help page: usage, what the command does, its own flags, then the keys (those that `help_text` picks)."""
    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    options = [
        textwrap.fill(text, width, initial_indent=f"  --{flag}  ", subsequent_indent=" " * (len(flag) + 6))
        for flag, text in (flags or {}).items()
    ]
    parts = [usage, textwrap.fill(about, width), *options, textwrap.fill(KEYS_INTRO, width), help_text(only, width)]
    return "\n\n".join(parts)


KEYS_INTRO = (
    "Keys stand in FILE.toml (`[actor]` and below it `num_nodes = 2`) or on the command line (`--actor.num_nodes=2` or "
    "`--actor.num_nodes 2`), which wins. Relative paths start at the file's directory, on the command line at the "
    "working directory. Defaults are in brackets."
)

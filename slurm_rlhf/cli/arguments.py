"""Parse what all commands share: FILE.toml, overrides and flags; lay out a help page."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.config.key_text import help_text
from slurm_rlhf.errors import ConfigError

WIDEST = 120
KEYS_INTRO = (
    "Set keys in FILE.toml (`[actor]` and below it `num_nodes = 2`) or on the command line (`--actor.num_nodes=2` or "
    "`--actor.num_nodes 2`), which wins. Relative paths start at the directory of the file, on the command line at the "
    "working directory. Defaults are in brackets."
)


@dataclass(frozen=True, slots=True)
class Command:
    """Describe a command: what its help page shows, and the function that runs it."""

    usage: str
    about: str
    run: Callable[[list[str]], int]  # takes the words after the command's name, returns the exit code
    options: Mapping[str, str] = field(default_factory=dict)  # the command's own, without dashes -> explanation
    keys: Collection[str] = ()  # groups and keys of the configuration to list; empty: it takes none

    def help_page(self) -> str:
        """Return all of `slurm-rlhf <name> --help`."""
        width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
        parts = [self.usage, textwrap.fill(self.about, width)]
        if self.options:
            column = max(map(len, self.options)) + 6
            lines = [
                textwrap.fill(text, width, initial_indent=f"  --{name}".ljust(column), subsequent_indent=" " * column)
                for name, text in self.options.items()
            ]
            parts.append("\n".join(lines))
        if not self.keys:
            return "\n\n".join(parts) + "\n"
        return "\n\n".join([*parts, textwrap.fill(KEYS_INTRO, width), help_text(self.keys, width)])


@dataclass(frozen=True, slots=True)
class Arguments:
    """Hold the words of a command, sorted."""

    file: Path
    overrides: list[str]
    flags: frozenset[str]


def parse(words: list[str], usage: str, flags: Collection[str] = ()) -> Arguments:
    """Sort `words` into FILE.toml, overrides, and the command's own `flags` (written with `_` or `-`).

    Raises ConfigError with the usage when the file is missing.
    """
    spelled = {spelling: flag for flag in flags for spelling in (f"--{flag}", f"--{flag.replace('_', '-')}")}
    rest = [word for word in words if word not in spelled]
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the TOML file comes first\n{usage}")
    return Arguments(Path(rest[0]), rest[1:], frozenset(spelled[word] for word in words if word in spelled))

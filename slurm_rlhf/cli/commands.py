"""Read `commands.toml`, the table of what every command takes; sort a command's words by it, and write help pages.

A command, `["bench sync"]` with a space where it is a part of another one:

    function      module of this room, a dot, and the function: it takes `Arguments` and returns the exit code
    by_mpi        the function that each process of mpirun calls in its place
    summary       its line in the overview
    usage         the words after its name
    about         its help page's text
    files         "needed" or "optional" configuration files and keys; absent: it takes other words
    plain         true: its words are taken as they are, none is an option
    passes        true: words after `--` go to the user's file as they are
    missing       what to say, with the usage, to a user who has left out the needed file
    keys          groups and keys of the configuration that it reads; "*": all but those in `without`
    default_keys  overrides if no file is given
    options       name -> about, kind (switch, text, int or float), default, least, most, step (the number's factor)
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import Any

from slurm_rlhf.config.keys import all_keys, changed_keys, groups, key_of
from slurm_rlhf.config.pipeline import COMMANDS, TRAIN
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.config.text import help_text, key_names, listed, split_overrides
from slurm_rlhf.errors import ConfigError, meant

WIDEST = 120
KEYS_INTRO = (
    "Set keys in FILE.toml (`[actor]` and below it `num_nodes = 2`) or on the command line (`--actor.num_nodes=2`), "
    "which wins. Relative paths start at the directory of the file, on the command line at the working directory."
)
ALL = "all"
"""The word after --help that lists every key of a command."""
SWITCH = "switch"


@dataclass(frozen=True, slots=True)
class Option:
    """Describe an option of a command, `--name=value` or `--name value`, or a switch."""

    about: str
    kind: str = "text"
    default: Any = None  # None: the command finds out whether it was given
    least: float = 1
    most: float = math.inf
    step: int = 1

    def read(self, name: str, text: str) -> Any:
        """Read the value of the option `name`. Raises ConfigError."""
        if self.kind not in ("int", "float"):
            return True if self.kind == SWITCH else text
        value = number(name, text, {"int": int, "float": float}[self.kind], self.least, self.most)
        if value % self.step:
            raise ConfigError(f"--{name} takes a multiple of {self.step}, got {text}")
        return value


@dataclass(frozen=True, slots=True)
class Arguments:
    """Hold the words of a command, sorted."""

    command: Command
    files: list[Path]  # a later file overrides an earlier one
    overrides: list[str]
    words: list[str]  # words of a command that takes no files
    options: dict[str, Any]  # name -> value; those not given have their default, or are absent if they have none
    passed: Sequence[str] = ()  # words for the user's file

    def error(self, text: str) -> ConfigError:
        """Make the error that says what is wrong with the words, and how the command is used."""
        return ConfigError(f"{text}\n{self.command.usage_line}")

    def one_word(self, what: str) -> str:
        """Return the only word. Raises ConfigError, which says that the command takes one `what`."""
        if len(self.words) != 1:
            raise self.error(f"{self.command.name} takes one {what}")
        return self.words[0]


@dataclass(frozen=True, slots=True)
class Command:
    """Describe a command: a row of `commands.toml`."""

    name: str
    usage: str
    about: str
    summary: str = ""
    function: str = ""  # empty: its parts have one
    by_mpi: str = ""
    files: str = ""
    plain: bool = False
    passes: bool = False
    missing: str = ""
    keys: tuple[str, ...] = ()
    default_keys: tuple[str, ...] = ()
    options: dict[str, Option] | None = None

    @property
    def usage_line(self) -> str:
        """Return the line that errors and the help page show."""
        return f"usage: slurm-rlhf {self.name} {self.usage}"

    def load(self) -> Callable[[Arguments], int]:
        """Import its module, and return its function."""
        function = self.function
        if self.by_mpi and not (self.name in STAGES and "RANK" in os.environ):  # torchrun's ranks may be below MPI's
            from slurm_rlhf.nodes.mpi.assignment import launched

            function = self.by_mpi if launched(os.environ) else function
        module, _, name = function.partition(".")
        found: Callable[[Arguments], int] = getattr(importlib.import_module(f"slurm_rlhf.cli.{module}"), name)
        return found

    def read(self, words: list[str]) -> Arguments:
        """Sort `words`. Files are the first words: one, and those right after it that end in .toml. Raises ConfigError.

        An option that is given twice has its last value. An unknown one is a key where the command takes keys.
        """
        if self.plain:
            return Arguments(self, [], [], words, {})
        options = self.options or {}
        given: dict[str, Any] = {}
        rest: list[str] = []
        end = words.index("--") if self.passes and "--" in words else len(words)
        left = iter(words[:end])
        for word in left:
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            option = options.get(name) if word.startswith("--") else None
            if option is None or (option.kind == SWITCH and equals):
                self._refuse_unknown(word, name)
                rest.append(word)
                continue
            if option.kind != SWITCH:
                value = value if equals else next(left, "")
                if not value or (not equals and value.startswith("--")):
                    raise ConfigError(f"--{name} takes a value: {option.about}\n{self.usage_line}")
            given[name] = option.read(name, value)
        given = {name: option.default for name, option in options.items() if option.default is not None} | given
        files = self._files(rest)
        keys, others = (rest[len(files) :], []) if self.files else ([], rest)
        return Arguments(self, files, keys, others, given, words[end + 1 :])

    def _refuse_unknown(self, word: str, name: str) -> None:
        near = [option for option in self.options or {} if option.replace("_", "") == name.replace("_", "")]
        if word.startswith("-") and near:
            raise ConfigError(f"unknown option {word}; did you mean --{near[0]}?")
        if word.startswith("--") and not self.files:
            raise ConfigError(f"unknown option {unknown(name, self.options or {})}\n{self.usage_line}")

    def _files(self, rest: list[str]) -> list[Path]:
        if not self.files or not rest or rest[0].startswith("-"):
            if self.files == "needed":
                raise ConfigError(f"the TOML file comes first{self.missing}\n{self.usage_line}")
            return []
        return [Path(word) for word in [rest[0], *takewhile(lambda word: word.endswith(".toml"), rest[1:])]]

    def help_page(self) -> str:
        """Return what `slurm-rlhf <name> --help` prints: options with explanations, and the names of the keys."""
        width = columns()
        parts = [self.usage_line, textwrap.fill(self.about, width)]
        if self.options:
            column = max(map(len, self.options)) + 6
            heads = {f"  --{name}".ljust(column): _shown(option) for name, option in self.options.items()}
            lines = [
                textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * column)
                for head, text in heads.items()
            ]
            parts.append("\n".join(lines))
        if not self.keys:
            return "\n\n".join(parts) + "\n"
        more = "Keys by group; `--help GROUP` or `--help KEY` explains them, `--help all` every one:"
        return "\n\n".join([*parts, textwrap.fill(KEYS_INTRO, width), f"{more}\n\n{key_names(self.keys, width)}"])

    def help_on(self, names: Collection[str]) -> str:
        """Return what `slurm-rlhf <name> --help NAME ...` prints: keys with explanations and defaults.

        Raises ConfigError for a name that is neither a key of this command, nor a group of them, nor `all`.
        """
        known = {part for key in all_keys().values() if listed(key, self.keys) for part in _parts(key.name)}
        for name in names:
            if name not in known | {ALL}:
                found = ", ".join(sorted(groups() & known))
                raise ConfigError(f"no help on {unknown(name, known)} (groups: {found}; or {ALL})")
        shown = [
            key.name for key in all_keys().values() if listed(key, self.keys) and (ALL in names or listed(key, names))
        ]
        return help_text(shown, columns())


@cache
def commands() -> dict[str, Command]:
    """Return all commands by name, in the order of the overview; "bench sync" is a part of bench."""
    text = Path(__file__).with_name("commands.toml").read_text(encoding="utf-8")
    return {name: _command(name, row) for name, row in tomllib.loads(text).items()}


def _command(name: str, row: dict[str, Any]) -> Command:
    everything = [field.name for field in fields(Config)]
    without = row.pop("without", ())
    keys = [key for word in row.pop("keys", ()) for key in (everything if word == "*" else [word])]
    row["keys"] = tuple(key for key in dict.fromkeys(keys) if key not in without)
    row["options"] = {option: Option(**table) for option, table in row.pop("options", {}).items()}
    row["default_keys"] = tuple(row.pop("default_keys", ()))
    return Command(name, **row)


def find_command(words: list[str]) -> tuple[Command, list[str]]:
    """Find the command that `words` begin with; return it and the words after its name. Raises ConfigError."""
    known = commands()
    for count in (2, 1):
        if (command := known.get(" ".join(words[:count]))) is not None and len(words) >= count:
            if command.function or {"-h", "--help"} & set(words[count:]):
                return command, words[count:]
            known = {name: part for name, part in known.items() if name.startswith(f"{command.name} ")}
            wrong = " ".join(words[: count + 1])
            raise ConfigError(f"unknown command {unknown(wrong, known)} (commands: {', '.join(known)})")
    top = [name for name in known if " " not in name]
    raise ConfigError(f"unknown command {unknown(words[0], top)} (commands: {', '.join(top)})")


def refuse_unread_keys(arguments: Arguments) -> None:
    """Raise ConfigError for a key on the command line that the command does not read."""
    for name, _ in split_overrides(arguments.overrides)[0]:
        key = key_of(name)
        if key is not None and not listed(key, arguments.command.keys):
            group = name.partition(".")[0]
            own = f" (it is a key of `slurm-rlhf {group}`)" if group in commands() else ""
            raise ConfigError(f"--{name} is not read by `slurm-rlhf {arguments.command.name}`{own}: leave it out")


def read_by(names: Iterable[str]) -> set[str]:
    """Return the keys and groups that a file for the commands `names` may set; it may be for other stages, too."""
    return {key for name in names for key in commands()[name].keys} | {"run_dir", *COMMANDS} - {TRAIN}


def unread(config: Config, read: Collection[str]) -> list[str]:
    """List the keys that are set and are not among those that are `read`."""
    return [key for key in changed_keys(config) if not listed(all_keys()[key], read)]


def overview() -> str:
    """Return what `slurm-rlhf --help` prints."""
    top = {name: command.summary for name, command in commands().items() if " " not in name}
    width = max(map(len, top))
    lines = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in top.items())
    return (
        "usage: slurm-rlhf COMMAND FILE.toml [FILE.toml ...] [--KEY=VALUE ...]\n\n"
        "RLHF on Slurm, MPI or one machine: one process group per role, DeepSpeed, vLLM, no Ray.\n\n"
        f"commands:\n{lines}\n\n"
        "`slurm-rlhf COMMAND --help` explains a command and names its keys, `slurm-rlhf COMMAND --help GROUP` explains "
        "those;\n`slurm-rlhf docs` has the documentation, `slurm-rlhf --version` prints the version."
    )


def number(name: str, text: str, kind: type[int] | type[float] = int, least: float = 1, most: float = math.inf) -> Any:
    """Read the number that the option `name` has as its value. Raises ConfigError."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or value == math.inf:
        what = "a whole number" if kind is int else "a number"
        limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(f"--{name} takes {what} {limits}, got {text!r}")
    return value


def unknown(name: str, known: Collection[str]) -> str:
    """Quote a name that is not `known`, with the nearest known one as a question."""
    return f"{name!r}{meant(name, known)}"


def columns() -> int:
    """Return the width of help pages and tables."""
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


def filled(template: str, **values: object) -> str:
    """Return a file of `templates` with `values` in it."""
    text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _shown(option: Option) -> str:
    return option.about + (f" [{option.default}]" if option.default not in (None, "") else "")


def _parts(name: str) -> set[str]:
    """Return a key and its groups: `algo.kl.target`, `algo.kl` and `algo`; or `resume` and `run`."""
    words = name.split(".")
    return {".".join(words[:count]) for count in range(1, len(words) + 1)} | ({"run"} if len(words) == 1 else set())

"""Run `slurm-rlhf`: find the command, import only its module, turn exceptions into messages and exit codes.

Has what all commands share, too: FILE.toml, overrides and flags, and the layout of a help page.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from slurm_rlhf import __version__
from slurm_rlhf.cluster.processes import keep_others_out, raise_descriptors
from slurm_rlhf.cluster.stop import note_early
from slurm_rlhf.config.keys import all_keys, groups
from slurm_rlhf.config.text import help_text, key_names, listed
from slurm_rlhf.disk import files_exhausted, refusal
from slurm_rlhf.errors import ConfigError, SlurmRlhfError, meant, printable, system_cause

WIDEST = 120
KEYS_INTRO = (
    "Set keys in FILE.toml (`[actor]` and below it `num_nodes = 2`) or on the command line (`--actor.num_nodes=2` or "
    "`--actor.num_nodes 2`), which wins. Relative paths start at the directory of the file, on the command line at the "
    "working directory."
)
ALL = "all"
"""The word behind --help that lists every key of a command."""


@dataclass(frozen=True, slots=True)
class Command:
    """Describe a command: what its help page shows, and the function that runs it."""

    usage: str
    about: str
    run: Callable[[list[str]], int]  # takes the words after the command's name, returns the exit code
    options: Mapping[str, str] = field(default_factory=dict)  # the command's own, without dashes -> explanation
    keys: Collection[str] = ()  # groups and keys of the configuration to list; empty: it takes none

    def help_page(self) -> str:
        """Return what `slurm-rlhf <name> --help` prints: of the keys, their names."""
        width = _width()
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
        more = "Keys by group; `--help GROUP` or `--help KEY` explains them, `--help all` every one:"
        return "\n\n".join([*parts, textwrap.fill(KEYS_INTRO, width), f"{more}\n\n{key_names(self.keys, width)}"])

    def help_on(self, names: Collection[str]) -> str:
        """Return what `slurm-rlhf <name> --help NAME ...` prints: keys with texts, and defaults in brackets.

        Raises ConfigError for a name that is neither a key of this command, nor a group of them, nor `all`.
        """
        known = {part for key in all_keys().values() if listed(key, self.keys) for part in _parts(key.name)}
        for name in names:
            if name not in known | {ALL}:
                found = ", ".join(sorted(groups() & known))
                raise ConfigError(f"no help on {unknown(name, known)} (groups: {found}; or {ALL})")
        return help_text(self.keys if ALL in names else names, _width())


def _parts(name: str) -> set[str]:
    """Return a key with the groups it is in: of `algo.kl.target` also `algo.kl` and `algo`; of `resume` also `run`."""
    words = name.split(".")
    return {".".join(words[:count]) for count in range(1, len(words) + 1)} | ({"run"} if len(words) == 1 else set())


def _width() -> int:
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Hold the words of a command, sorted."""

    files: list[Path]  # at least one; what a later one says counts
    overrides: list[str]
    flags: frozenset[str]


def parse(words: list[str], usage: str, flags: Collection[str] = ()) -> Arguments:
    """Sort `words` into files, overrides, and the command's own `flags` (written with `_` or `-`).

    The first word is a file, and so are those right behind it that end in .toml.

    Raises ConfigError with the usage when the file is missing.
    """
    spelled = {spelling: flag for flag in flags for spelling in (f"--{flag}", f"--{flag.replace('_', '-')}")}
    rest = [word for word in words if word not in spelled]
    for word in rest:
        plain = word.partition("=")[0].lstrip("-").replace("-", "").replace("_", "")
        for flag in flags if word.startswith("-") else ():
            if plain == flag.replace("_", ""):
                raise ConfigError(f"unknown option {word}; did you mean --{flag}?")
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the TOML file comes first\n{usage}")
    count = 1 + len(list(takewhile(lambda word: word.endswith(".toml") and not word.startswith("-"), rest[1:])))
    files = [Path(word) for word in rest[:count]]
    return Arguments(files, rest[count:], frozenset(spelled[word] for word in words if word in spelled))


def take_options(
    words: list[str],
    options: Mapping[str, str],
    usage: str,
    switches: Collection[str] = (),
    strict: bool = True,
) -> tuple[dict[str, str], list[str]]:
    """Part the `options` of a command, `--name=value` or `--name value`, and its `switches`, from its other words.

    `options`: name -> explanation, switches among them. Of an option that stands twice the later value counts. Raises
    ConfigError for one without a value and, where it is `strict`, for one that is not known; otherwise that is one of
    the other words.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in options or (name in switches and equals):
            if strict and word.startswith("-"):
                raise ConfigError(f"unknown option {unknown(name, options)}\n{usage}")
            rest.append(word)
            continue
        if name not in switches:
            value = value if equals else next(left, "")
            if not value or (not equals and value.startswith("--")):
                raise ConfigError(f"--{name} takes a value: {options[name]}\n{usage}")
        given[name] = value
    return given, rest


COMMANDS = {
    "init": ("init", "write the files of a new run for this cluster"),
    "train": ("train", "train a policy by PPO, GRPO or an algorithm of your own"),
    "check": ("check", "look at everything that a run reads, and start nothing"),
    "preflight": ("preflight", "look at the nodes that a run would start on"),
    "sft": ("train", "train a model on examples, the usual step before PPO"),
    "generate": ("generate", "answer the rows of a file with engines on every GPU"),
    "submit": ("train", "submit `train` as a Slurm job"),
    "status": ("status", "show the state of a job and how far its run is"),
    "report": ("report", "write a page that shows a run, or several beside each other"),
    "cancel": ("cancel", "end a run, at once or after it has saved"),
    "plan": ("plan", "show which rank of which role goes on which node"),
    "check-parity": ("check_parity", "compare the log-probs of vLLM, transformers and the trainer on a model"),
    "migrate": ("init", "translate a command of OpenRLHF into a TOML file"),
    "completion": ("docs", "print what completes words in bash or zsh"),
    "docs": ("docs", "show a page of the documentation"),
    "eval": ("generate", "evaluate a model on several data sets: pass@k, majority votes, intervals"),
    "bench": ("bench", "measure parts of a run and compare them with plain loops"),
}
"""Name -> (module of this room whose `COMMANDS` holds the command, summary)."""

INTERRUPTED = 130  # 128 + SIGINT, as shells count


class CommandPage(Protocol):
    """Run a command and explain it: implemented by `Command`, and by a module for each bench."""

    def help_page(self) -> str:
        """Return all of `slurm-rlhf <name> --help`."""

    @property
    def run(self) -> Callable[[list[str]], int]:
        """Run it with the words after its name; returns the exit code."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 the run failed, 2 something the user can fix, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    # A script's `command &`, nohup and some batch systems start it with SIGINT ignored, and no Ctrl-C would end it.
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        note_early()  # imports and preflight take a minute
    raise_descriptors()
    keep_others_out()
    return guarded(lambda: _dispatch(words))


def guarded(work: Callable[[], int]) -> int:
    """Return what `work` returns; exceptions become messages and exit codes, as `main` says."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except SlurmRlhfError as error:
        print(f"slurm-rlhf: error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("slurm-rlhf: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left, as `| head` does; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # A full disk or a missing permission; the logs of the run say what it stopped.
        place = Path(str(error.filename or "."))
        told = files_exhausted() if error.errno in (errno.EMFILE, errno.ENFILE) else refusal(error, place)
        text = f"{place}: {told}" if told else f"{error}{_origin(error)}"
        print(f"slurm-rlhf: error: {printable(text)}", file=sys.stderr)
        return 1
    except Exception as error:
        return _unexpected(error)


def _origin(error: OSError) -> str:
    """Say of an error that names no file which line met it, and what may have changed the call there."""
    if error.filename is not None:
        return ""
    line = traceback.extract_tb(error.__traceback__)[-1]
    cause = system_cause(str(error))
    return f", from `{line.line}` ({line.filename}:{line.lineno}){f'. {cause}' * bool(cause)}"


def _unexpected(error: Exception) -> int:
    if told := foreign_module(error, os.environ.get("PYTHONPATH", "")):
        print(f"slurm-rlhf: error: {told}", file=sys.stderr)
        return ConfigError.exit_code
    text = "".join(traceback.format_exception(error))
    cause = system_cause(text) or "this is a bug in slurm_rlhf, not in your input"
    print(printable(f"{text}slurm-rlhf: {cause}"), file=sys.stderr)
    return 1


def foreign_module(error: Exception, python_path: str) -> str:
    """Name the file on PYTHONPATH that could not be imported, or lacks what was wanted of it; "" if there is none."""
    package = Path(__file__).resolve().parents[1]
    for file in _suspects(error):
        for entry in filter(None, python_path.split(os.pathsep)):
            parents = file.resolve().parents
            if Path(entry).resolve() in parents and package not in parents:
                return (
                    f"{file} is imported because PYTHONPATH has {entry}, and it does not work here: "
                    f"{type(error).__name__}: {error}. Take {entry} out of PYTHONPATH (unset PYTHONPATH), or mend or "
                    "rename the file"
                )
    return ""


def _suspects(error: Exception) -> list[Path]:
    """List the files whose import may have failed, the nearest to the failure first."""
    named: list[object] = []
    if isinstance(error, SyntaxError):
        named.append(error.filename)
    if isinstance(error, ImportError):
        module = sys.modules.get((error.name or "").partition(".")[0])
        named += [error.path, getattr(module, "__file__", None)]
    if isinstance(error, AttributeError):
        named.append(getattr(error.obj, "__file__", None))  # the file of a module
    frames = reversed(traceback.extract_tb(error.__traceback__))
    named += [frame.filename for frame in frames if frame.name == "<module>"]
    return [Path(name) for name in named if isinstance(name, str)]


def unknown(name: str, known: Collection[str]) -> str:
    """Quote a name that is not `known`, and ask whether the one that is nearest to it was meant."""
    return f"{name!r}{meant(name, known)}"


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_overview(), file=sys.stderr)
        return ConfigError.exit_code
    name, rest = words[0], words[1:]
    if name == "help" and rest:
        return _dispatch([*rest, "--help"])
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"slurm-rlhf {__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {unknown(name, COMMANDS)} (commands: {', '.join(COMMANDS)})")
    command: CommandPage = importlib.import_module(f"slurm_rlhf.cli.{COMMANDS[name][0]}").COMMANDS[name]
    # Each bench has its own help page.
    if rest[:1] in (["-h"], ["--help"]) or (name != "bench" and ("-h" in rest or "--help" in rest)):
        place = next(place for place, word in enumerate(rest) if word in ("-h", "--help"))
        print(_help(command, [word.lstrip("-") for word in rest[place + 1 :]]), end="")
        return 0
    return command.run(rest)


def _help(command: CommandPage, names: list[str]) -> str:
    if names and isinstance(command, Command) and command.keys:
        return command.help_on(names)
    return command.help_page()


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name.ljust(width)}  {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: slurm-rlhf COMMAND FILE.toml [FILE.toml ...] [--KEY=VALUE ...]\n\n"
        "RLHF on Slurm, MPI or one machine: one process group per role, DeepSpeed, vLLM, no Ray.\n\n"
        f"commands:\n{commands}\n\n"
        "`slurm-rlhf COMMAND --help` explains a command and names its keys, `slurm-rlhf COMMAND --help GROUP` explains "
        "those;\n`slurm-rlhf docs` has the documentation, `slurm-rlhf --version` prints the version."
    )

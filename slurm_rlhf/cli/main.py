"""Run `slurm-rlhf`: find the command, import only its module, turn exceptions into messages and exit codes.

Also holds what all commands share: the parsing of files, overrides and options, and the layout of help pages.
"""

from __future__ import annotations

import errno
import importlib
import math
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
from typing import Any

from slurm_rlhf import __version__
from slurm_rlhf.cluster.processes import keep_others_out, raise_descriptors
from slurm_rlhf.cluster.stop import note_early
from slurm_rlhf.config.keys import all_keys, groups
from slurm_rlhf.config.text import help_text, key_names, listed
from slurm_rlhf.errors import ConfigError, SlurmRlhfError, meant, printable, system_cause
from slurm_rlhf.run_directory import files_exhausted, refusal

WIDEST = 120
KEYS_INTRO = (
    "Set keys in FILE.toml (`[actor]` and below it `num_nodes = 2`) or on the command line (`--actor.num_nodes=2` or "
    "`--actor.num_nodes 2`), which wins. Relative paths start at the directory of the file, on the command line at the "
    "working directory."
)
ALL = "all"
"""The word after --help that lists every key of a command."""


@dataclass(frozen=True, slots=True)
class Command:
    """Describe a command: what its help page shows, and the function that runs it."""

    usage: str
    about: str
    run: Callable[[list[str]], int]  # takes the words after the command's name, returns the exit code
    options: Mapping[str, str] = field(default_factory=dict)  # name without dashes -> explanation
    keys: Collection[str] = ()  # groups and keys of the configuration that it takes

    def help_page(self) -> str:
        """Return what `slurm-rlhf <name> --help` prints: options with explanations, and the names of the keys."""
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
        """Return what `slurm-rlhf <name> --help NAME ...` prints: keys with explanations and defaults.

        Raises ConfigError for a name that is neither a key of this command, nor a group of them, nor `all`.
        """
        known = {part for key in all_keys().values() if listed(key, self.keys) for part in _parts(key.name)}
        for name in names:
            if name not in known | {ALL}:
                found = ", ".join(sorted(groups() & known))
                raise ConfigError(f"no help on {unknown(name, known)} (groups: {found}; or {ALL})")
        return help_text(self.keys if ALL in names else names, _width())


def _parts(name: str) -> set[str]:
    """Return a key and its groups: `algo.kl.target`, `algo.kl` and `algo`; or `resume` and `run`."""
    words = name.split(".")
    return {".".join(words[:count]) for count in range(1, len(words) + 1)} | ({"run"} if len(words) == 1 else set())


def _width() -> int:
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Hold the words of a command, sorted."""

    files: list[Path]  # a later file overrides an earlier one
    overrides: list[str]
    flags: frozenset[str]


def parse(words: list[str], usage: str, flags: Mapping[str, str] = {}, file_needed: bool = True) -> Arguments:
    """Sort `words` into files, overrides, and the command's own `flags`.

    The first word is a file, and so are the words right after it that end in .toml.

    Raises ConfigError with the usage when the file is missing.
    """
    given, rest = take_options(words, flags, usage, flags, strict=False)
    if file_needed and (not rest or rest[0].startswith("-")):
        raise ConfigError(f"the TOML file comes first\n{usage}")
    first = rest[:1] if rest and not rest[0].startswith("-") else []
    more = list(takewhile(lambda word: word.endswith(".toml") and not word.startswith("-"), rest[1:])) if first else []
    files = [Path(word) for word in first + more]
    return Arguments(files, rest[len(files) :], frozenset(given))


def take_options(
    words: list[str],
    options: Mapping[str, str],
    usage: str,
    switches: Collection[str] = (),
    strict: bool = True,
) -> tuple[dict[str, str], list[str]]:
    """Separate the `options` of a command, `--name=value` or `--name value`, and its `switches` from its other words.

    `options`: name -> explanation, switches included. If an option is given twice, the later value counts. Raises
    ConfigError for an option without a value and, if `strict`, for an unknown option; otherwise an unknown option is
    one of the other words.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in options or (name in switches and equals):
            near = [option for option in options if option.replace("_", "") == name.replace("_", "")]
            if word.startswith("-") and near:
                raise ConfigError(f"unknown option {word}; did you mean --{near[0]}?")
            if word.startswith("-") and strict:
                raise ConfigError(f"unknown option {unknown(name, options)}\n{usage}")
            rest.append(word)
            continue
        if name not in switches:
            value = value if equals else next(left, "")
            if not value or (not equals and value.startswith("--")):
                raise ConfigError(f"--{name} takes a value: {options[name]}\n{usage}")
        given[name] = value
    return given, rest


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


COMMANDS = {
    "init": ("init", "write the files of a new run for this cluster"),
    "train": ("train", "train a policy by PPO, GRPO or an algorithm of your own"),
    "check": ("check", "read everything that a run reads, and start nothing"),
    "preflight": ("preflight", "examine the nodes that a run would start on"),
    "sft": ("train", "train a model on examples, the usual step before PPO"),
    "generate": ("generate", "answer the rows of a file with engines on every GPU"),
    "submit": ("train", "submit `train` as a Slurm job"),
    "status": ("status", "show the state of a job and how far its run is"),
    "report": ("runs", "write a page that shows a run, or compares several"),
    "cancel": ("runs", "end a run, at once or after it has saved"),
    "plan": ("plan", "show which rank of which role goes on which node"),
    "check-parity": ("check_parity", "compare the log-probs of vLLM, transformers and the trainer on a model"),
    "migrate": ("init", "translate a command of OpenRLHF into a TOML file"),
    "completion": ("docs", "print what completes words in bash or zsh"),
    "docs": ("docs", "show a page of the documentation"),
    "eval": ("generate", "evaluate a model on several data sets: pass@k, majority votes, intervals"),
    "bench": ("bench", "measure parts of a run and compare them with plain loops"),
}
"""Name -> (module of this room whose `COMMANDS` has the command, summary)."""

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 the run failed, 2 something the user can fix, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    # `command &` in a script, nohup and some batch systems start it with SIGINT ignored: Ctrl-C would not end it.
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        note_early()  # imports and preflight take a minute
    raise_descriptors()
    keep_others_out()
    code = guarded(lambda: _dispatch(words))
    if argv is None and words[:1] == ["bench"]:
        sys.stderr.flush()
        os._exit(code)  # as a rank does: on a GPU the interpreter's teardown of two engines ended in an abort
    return code


def guarded(work: Callable[[], int]) -> int:
    """Return what `work` returns. Exceptions become messages and exit codes, as `main` lists them."""
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
        # The reader has ended, as `| head` does; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        place = Path(str(error.filename or "."))
        why = files_exhausted() if error.errno in (errno.EMFILE, errno.ENFILE) else refusal(error, place)
        text = f"{place}: {why}" if why else f"{error}{_origin(error)}"
        print(f"slurm-rlhf: error: {printable(text)}", file=sys.stderr)
        return 1
    except Exception as error:
        return _unexpected(error)


def _origin(error: OSError) -> str:
    """If an error names no file, return the line that raised it, and a known cause of such an error."""
    if error.filename is not None:
        return ""
    line = traceback.extract_tb(error.__traceback__)[-1]
    cause = system_cause(str(error))
    return f", from `{line.line}` ({line.filename}:{line.lineno}){f'. {cause}' * bool(cause)}"


def _unexpected(error: Exception) -> int:
    if blamed := foreign_module(error, os.environ.get("PYTHONPATH", "")):
        print(f"slurm-rlhf: error: {blamed}", file=sys.stderr)
        return ConfigError.exit_code
    text = "".join(traceback.format_exception(error))
    cause = system_cause(text) or "this is a bug in slurm_rlhf, not in your input"
    print(printable(f"{text}slurm-rlhf: {cause}"), file=sys.stderr)
    return 1


def foreign_module(error: Exception, python_path: str) -> str:
    """Explain that a file on PYTHONPATH breaks an import, because it hides another module; "" if none does."""
    package = Path(__file__).resolve().parents[1]
    for file in _suspects(error):
        for entry in filter(None, python_path.split(os.pathsep)):
            parents = file.resolve().parents
            if Path(entry).resolve() in parents and package not in parents:
                return (
                    f"{file} is imported because PYTHONPATH has {entry}, and it does not work here: "
                    f"{type(error).__name__}: {error}. Take {entry} out of PYTHONPATH (unset PYTHONPATH), or repair "
                    "or rename the file"
                )
    return ""


def _suspects(error: Exception) -> list[Path]:
    """List the files whose import may have failed, the most likely first."""
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
    """Quote a name that is not `known`, with the nearest known one as a question."""
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
    command: Command = importlib.import_module(f"slurm_rlhf.cli.{COMMANDS[name][0]}").COMMANDS[name]
    # Each bench has its own help page.
    if rest[:1] in (["-h"], ["--help"]) or (name != "bench" and ("-h" in rest or "--help" in rest)):
        place = next(place for place, word in enumerate(rest) if word in ("-h", "--help"))
        names = [word.lstrip("-") for word in rest[place + 1 :]]
        print(command.help_on(names) if names and command.keys else command.help_page(), end="")
        return 0
    return command.run(rest)


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

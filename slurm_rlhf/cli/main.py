"""Run `slurm-rlhf`: find the command, import only its module, turn exceptions into messages and exit codes."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Protocol

from slurm_rlhf import __version__
from slurm_rlhf.errors import ConfigError, SlurmRlhfError

COMMANDS = {
    "train": ("train", "train a policy by PPO, GRPO or an algorithm of your own"),
    "sft": ("train", "train a model on examples, the usual step before PPO"),
    "submit": ("train", "submit `train` as a Slurm job"),
    "status": ("status", "show the state of a job and how far its run is"),
    "cancel": ("cancel", "end a run, at once or after it has saved"),
    "plan": ("plan", "show which rank of which role goes on which node"),
    "bench": ("bench", "measure parts of a run and compare them with plain loops"),
}
"""Name -> (module of this room whose `COMMANDS` holds the command, summary)."""

INTERRUPTED = 130  # 128 + SIGINT, as shells count


class CommandPage(Protocol):
    """Run a command and explain it: implemented by `arguments.Command`, and by a module for each bench."""

    def help_page(self) -> str:
        """Return all of `slurm-rlhf <name> --help`."""

    @property
    def run(self) -> Callable[[list[str]], int]:
        """Run it with the words after its name; returns the exit code."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 the run failed, 2 something the user can fix, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _dispatch(words))


def guarded(work: Callable[[], int]) -> int:
    """Return what `work` returns; exceptions become messages and exit codes, as `main` says."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except SlurmRlhfError as error:
        print(f"slurm-rlhf: error: {error}", file=sys.stderr)
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
        print(f"slurm-rlhf: error: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        print("slurm-rlhf: this is a bug in slurm_rlhf, not in your input", file=sys.stderr)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_overview(), file=sys.stderr)
        return ConfigError.exit_code
    name, rest = words[0], words[1:]
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"slurm-rlhf {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown command {name!r}{meant} (commands: {', '.join(COMMANDS)})")
    command: CommandPage = importlib.import_module(f"slurm_rlhf.cli.{COMMANDS[name][0]}").COMMANDS[name]
    # Each bench has its own help page.
    if rest[:1] in (["-h"], ["--help"]) or (name != "bench" and ("-h" in rest or "--help" in rest)):
        print(command.help_page(), end="")
        return 0
    return command.run(rest)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name.ljust(width)}  {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: slurm-rlhf COMMAND FILE.toml [--KEY=VALUE ...]\n\n"
        "RLHF on Slurm, MPI or one machine: one process group per role, DeepSpeed, vLLM, no Ray.\n\n"
        f"commands:\n{commands}\n\n"
        "`slurm-rlhf COMMAND --help` explains a command and lists its keys; `slurm-rlhf --version` prints the version."
    )

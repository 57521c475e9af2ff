"""Run `slurm-rlhf`: find the command, import only its module, turn exceptions into messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from slurm_rlhf import __version__
from slurm_rlhf.cli.commands import find_command, overview
from slurm_rlhf.cluster.processes import keep_others_out, raise_descriptors
from slurm_rlhf.cluster.stop import note_early
from slurm_rlhf.errors import ConfigError, SlurmRlhfError, printable, system_cause
from slurm_rlhf.run_directory import files_exhausted, refusal

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
    if argv is None and "torch" in sys.modules:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        # No interpreter teardown, as in a rank: it aborts if a thread of a process group frees a tensor meanwhile, or
        # if the process had two engines on a GPU.
        os._exit(code)
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
    text = "".join(traceback.format_exception(error))
    package = Path(__file__).resolve().parents[1]
    module = getattr(error, "obj", None) or sys.modules.get((getattr(error, "name", None) or "").partition(".")[0])
    places = f"{text}{getattr(module, '__file__', '')}"
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if f"{entry}/" in places and not package.is_relative_to(Path(entry).resolve()):
            first = f"{type(error).__name__}: {error}"
            text = f"a module in {entry} does not work here: {first}. Take {entry} out of PYTHONPATH (unset PYTHONPATH)"
            print(f"slurm-rlhf: error: {text}", file=sys.stderr)
            return ConfigError.exit_code
    cause = system_cause(text) or "this is a bug in slurm_rlhf, not in your input"
    print(printable(f"{text}slurm-rlhf: {cause}"), file=sys.stderr)
    return 1


def _dispatch(words: list[str]) -> int:
    if not words:
        print(overview(), file=sys.stderr)
        return ConfigError.exit_code
    name, rest = words[0], words[1:]
    if name == "help" and rest:
        return _dispatch([*rest, "--help"])
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"slurm-rlhf {__version__}")
        return 0
    command, rest = find_command(words)
    if place := next((place for place, word in enumerate(rest, 1) if word in ("-h", "--help")), 0):
        names = [word.lstrip("-") for word in rest[place:]]
        print(command.help_on(names) if names and command.keys else command.help_page(), end="")
        return 0
    return command.load()(command.read(rest))

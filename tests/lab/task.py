"""The command lines of `learn`, `recipes` and `inflight`, and whole runs as processes of their own."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_rlhf.cli.main import guarded
from slurm_rlhf.errors import ConfigError, RunError

TRAIN = [sys.executable, "-m", "slurm_rlhf.cli", "train"]
LIMIT_S = 3600.0
"""Seconds that one run may take."""


def parser(about: str | None, **defaults: int | str) -> argparse.ArgumentParser:
    """Return a parser with an option for each default, and `--json`."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        made.add_argument(f"--{name}", type=type(value), default=value, help=f"[{value}]")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def make_new(directory: Path) -> None:
    """Make the directory of a comparison. Raises ConfigError where it holds something: runs with other settings."""
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"--out={directory} holds something already: give a new directory")
    directory.mkdir(parents=True, exist_ok=True)


def layers(words: list[str]) -> tuple[list[str], list[str]]:
    """Part the files at the beginning of `words`, and the keys after them."""
    count = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:count], words[count:]


def printed(measure: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], str], as_json: bool) -> int:
    """Measure, and print the result as JSON or for a reader; what is said meanwhile goes to standard error.

    Returns the exit code, as `slurm-rlhf` has it.
    """

    def work() -> int:
        with contextlib.redirect_stdout(sys.stderr):
            result = measure()
        print(json.dumps(result) if as_json else show(result))
        return 0

    return guarded(work)


def run_process(command: list[str], log: Path, read: Callable[[str], None] = lambda line: None) -> None:
    """Run a process to its end, its output into `log`, each line shown to `read`. Raises RunError when it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began, timer = time.monotonic(), threading.Timer(LIMIT_S, process.kill)  # it may say nothing any more
    timer.start()
    try:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                read(line)
                file.write(line)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code and time.monotonic() - began >= LIMIT_S:
        raise RunError(f"{' '.join(command[1:4])} did not end within {LIMIT_S:g} s; see {log}")
    if code:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-5:])
        raise RunError(f"{' '.join(command[1:4])} ended with {code}; all of its output: {log}\n{tail}")

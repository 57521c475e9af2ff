"""Stacks of processes as data: taken in this process, or read from what faulthandler and py-spy have written."""

from __future__ import annotations

import faulthandler
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

MAIN = "MainThread"
"""The name of a process's first thread, as in `threading`."""
LATE = re.compile(r"^(?=Stack \(most recent call first\):$)", re.MULTILINE)
"""How the stack that a thread writes of itself begins, as in `late_stacks`."""

_THREAD = re.compile(r"^(?:Current thread|Thread|(?=Stack)) ?(?P<name>.+?) \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_SPY_THREAD = re.compile(r'^Thread \S+ \((?P<state>[^)]*)\)(?:: "(?P<name>.*)")?$')
_SPY_FRAME = re.compile(r"^ {4}(?P<function>.+) \((?P<file>.+?)(?::(?P<line>\d+))?\)$")


@dataclass(frozen=True, slots=True)
class Frame:
    """Says where a call stands."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}'


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Holds the stack of one thread, the innermost call first."""

    name: str
    frames: tuple[Frame, ...]
    holds_lock: bool = False  # holds the interpreter's lock; only py-spy knows

    def __str__(self) -> str:
        return "\n".join([f"Thread {self.name} (most recent call first):", *map(str, self.frames)])


def late_s(heartbeat_s: float) -> float:
    """Return after how many seconds without a heartbeat a rank's log gets its stacks: well before the rank is lost."""
    return heartbeat_s / 4


def own_stacks() -> list[ThreadStack]:
    """Take the stacks of all threads of this process, the main thread first."""
    descriptor = os.memfd_create("stacks")
    with open(descriptor, "r+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("utf-8", errors="replace")
    for thread in threading.enumerate():
        if thread.ident is not None:
            text = text.replace(f"hread 0x{thread.ident:016x} (", f"hread {thread.name} (")
    return read_stacks(text)


def written(threads: Sequence[ThreadStack]) -> str:
    """Write stacks in the format of faulthandler."""
    return "\n\n".join(map(str, threads))


def read_stacks(text: str) -> list[ThreadStack]:
    """Read what `written` or faulthandler wrote, the main thread first; whatever else is in `text` is passed over.

    Faulthandler names no threads, and writes the main thread last.
    """
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append((head["name"], []))
        elif found and (frame := _FRAME.match(line)):
            found[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    threads = [ThreadStack(name, tuple(frames)) for name, frames in found]
    if threads and not any(thread.name == MAIN for thread in threads):
        threads = [ThreadStack(MAIN, threads[-1].frames), *threads[:-1]]
    return sorted(threads, key=lambda thread: thread.name != MAIN)


def last_late_dump(log: str) -> str:
    """Return the stack that a thread wrote of itself, as `late_stacks` has it, if a log ends with it; empty: none.

    A process that has written something since has gone on: its stack of then says nothing of where it is now.
    """
    marks = list(LATE.finditer(log))
    if not marks:
        return ""
    lines = []
    for line in log[marks[-1].end() :].strip("\n").splitlines():
        if line and not (_THREAD.match(line) or _FRAME.match(line)) and not line.startswith("  "):
            return ""
        lines.append(line)
    return "\n".join(lines).strip("\n")


def read_spy(text: str) -> list[ThreadStack]:
    """Read what `py-spy dump` printed, the main thread first."""
    found: list[tuple[str, bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _SPY_THREAD.match(line):
            found.append((head["name"] or "?", "gil" in head["state"], []))
        elif found and (frame := _SPY_FRAME.match(line)):
            found[-1][2].append(Frame(frame["file"], int(frame["line"] or 0), frame["function"]))
    threads = [ThreadStack(name, tuple(frames), lock) for name, lock, frames in found]
    return sorted(threads, key=lambda thread: thread.name != MAIN)

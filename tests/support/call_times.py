"""What the ranks of a run were called to do, and when: each notes a call when it takes it and when it answers it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NOTING = """
import os, sys, time

role = next((word.partition("=")[2] for word in sys.orig_argv if word.startswith("--role=")), "")
if role and "LOCAL_RANK" in os.environ:
    from slurm_rlhf.control.client import ControlClient
    from slurm_rlhf.control.messages import Request

    file = os.open(os.environ["TEST_CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    receive, answer = ControlClient.receive, Request._answer

    def note(word, request):
        part = request.args.get("part", "")
        line = f"{word} {time.monotonic_ns()} {os.getpid()} {role} {request.id} {request.method}{part and '.' + part}"
        os.write(file, f"{line}\\n".encode())

    def noted_receive(self, *args):
        request = receive(self, *args)
        if request is not None:
            note("begin", request)
        return request

    def noted_answer(self, kind, frames):
        note("end", self)
        return answer(self, kind, frames)

    ControlClient.receive, Request._answer = noted_receive, noted_answer
"""


@dataclass(frozen=True, slots=True)
class Call:
    role: str
    method: str
    begin: int  # CLOCK_MONOTONIC, ns: one clock for all processes of a machine
    end: int

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@contextmanager
def noted(directory: Path) -> Iterator[Path]:
    """Runs that start within it note their calls, for `calls` to read."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(NOTING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{directory}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("TEST_CALLS", str(directory / "calls"))
        yield directory / "calls"


def calls(file: Path) -> list[Call]:
    """All answered calls, in the order in which they began."""
    begins: dict[tuple[str, ...], int] = {}
    found = []
    for line in file.read_text().splitlines():
        word, at, *key, method = line.split()
        if word == "begin":
            begins[tuple(key)] = int(at)
        else:
            found.append(Call(key[1], method, begins[tuple(key)], int(at)))
    return sorted(found, key=lambda call: call.begin)

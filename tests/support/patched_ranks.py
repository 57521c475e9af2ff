"""Ranks of whole runs that are changed where Python starts: to behave otherwise, or to note which calls they take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

_ENGINES = """
import importlib.abc, importlib.machinery, os, sys

NAME = "slurm_rlhf.engine.vllm"

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec

if "--role=rollout" in sys.orig_argv and os.environ.get("LOCAL_RANK") in RANKS:
    if NAME in sys.modules:  # forked from a process that has imported it
        change(sys.modules[NAME])
    else:
        sys.meta_path.insert(0, Finder())
"""


_NOTING = """
import os, sys, time

role = next((word.partition("=")[2] for word in sys.orig_argv if word.startswith("--role=")), "")
if role and "LOCAL_RANK" in os.environ:
    from slurm_rlhf.wire.client import ControlClient
    from slurm_rlhf.wire.messages import Request

    file = os.open(os.environ["TEST_CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    receive, answer = ControlClient.receive, Request._answer

    def note(word, request):
        given = request.argument()
        part = given.get("part", "") if isinstance(given, dict) else ""
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
def patched(directory: Path, source: str, **environment: str) -> Iterator[None]:
    """All processes of runs that start within it run `source` first; it is written into `directory`."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{directory}:{os.environ.get('PYTHONPATH', '')}")
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


def patched_engines(directory: Path, change: str, ranks: tuple[str, ...] = ("0", "1")) -> AbstractContextManager[None]:
    """`change` is source that defines `change(module)` for engine/vllm.py, for these local `ranks`."""
    return patched(directory, f"{change}\nRANKS = {ranks!r}\n{_ENGINES}")


@contextmanager
def noted(directory: Path) -> Iterator[Path]:
    """Ranks of runs that start within it note each call when they take it and when they answer it, for `calls`."""
    with patched(directory, _NOTING, TEST_CALLS=str(directory / "calls")):
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


def in_one_piece(done: list[Call]) -> list[Call]:
    """The calls, with those in which the responses of one generation come as one."""
    found: list[Call] = []
    for call in done:
        if found and str(call) == str(found[-1]) == "rollout.generate":
            found[-1] = replace(call, begin=found[-1].begin, end=max(found[-1].end, call.end))
        else:
            found.append(call)
    return found

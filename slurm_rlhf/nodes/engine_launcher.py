"""Define what starts the engines of a job, each for itself, and again when it has ended.

`nodes.agent_engines` does. Under MPI nothing starts again: a rank that is gone is missing in COMM_WORLD.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from slurm_rlhf.cluster.processes import KILLED
from slurm_rlhf.wire import timeouts

Environment = Mapping[str, Mapping[str, str]]
"""Node -> variables of its ranks."""


class EngineLauncher(Protocol):
    """Starts the engines of one rank map. Made by the command line, used by the thread that leads the job.

    An engine ends when one of its ranks does: the others are ended with it, and no other engine is.
    """

    unfit: Mapping[str, str]
    """Node -> why no engine is to start there, though it is one of `spares`."""

    @property
    def spares(self) -> list[str]:
        """List the nodes without ranks, on which an engine can start that has lost its own."""

    def start(self, arguments: list[str], environment: Environment) -> None:
        """Start all engines, whose ranks get `arguments`; it does not wait for them. Called once."""

    def ended(self) -> list[tuple[int, str]]:
        """Return (engine, how) of the engines that ended since the last call, but by `end`. Does not block."""

    def end(self, engine: int) -> None:
        """End what is left of an engine, by force; returns at once."""

    def gone(self, engine: int) -> bool:
        """Tell whether no process of an engine is left, as far as its node says."""

    def start_again(self, engine: int, node: str) -> None:
        """Start an engine that is gone, on its own node or one of `spares`; it does not wait for it.

        Its processes end with the thread that calls this.
        """

    def stop(self, done: bool, grace_s: float) -> None:
        """End every engine and wait until it is gone; `done`: all are leaving, and get `grace_s` seconds for it."""


class EngineEnds:
    """Collects how engines ended: their launcher knows of signals, a rank that is left only that another is gone."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[float, str]] = {}

    def said(self, engine: int, why: str) -> None:
        """Note what a rank says ended its engine, whose processes end within the second. For any thread."""
        self._said.setdefault(engine, (time.monotonic(), why))

    def news(self, ended: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return (engine, why): what the launcher has `ended`, and what a rank said where that has not come in time."""
        found = []
        for engine, how in ended:
            _, why = self._said.pop(engine, (0.0, how))
            found.append((engine, how if KILLED in how else why))
        due = [engine for engine, (at, _) in list(self._said.items()) if time.monotonic() > at + timeouts.ENGINE_END_S]
        return found + [(engine, self._said.pop(engine)[1]) for engine in due]

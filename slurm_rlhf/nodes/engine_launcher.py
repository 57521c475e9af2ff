"""Start the engines of a job, each for itself, and again when it has ended: the protocol, and one machine.

Under Slurm: `nodes.slurm_engines`. Under MPI nothing starts again: a rank that is gone is missing in COMM_WORLD.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from slurm_rlhf.cluster.local_directory import LocalDirectory, take_temporary
from slurm_rlhf.cluster.processes import KILLED
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.nodes.children import EngineRanks
from slurm_rlhf.nodes.environment import visible_gpus, without_gpu_choice
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
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


class LocalEngines:
    """Implements `EngineLauncher` on this machine."""

    unfit: Mapping[str, str] = {}

    def __init__(self, run_dir: Path, ranks: RankMap) -> None:
        self._run_dir = run_dir
        self._ranks = ranks
        self._engines: EngineRanks | None = None
        self._temporary: LocalDirectory | None = None
        self._lock = threading.Lock()
        self._stopping = False

    @property
    def spares(self) -> list[str]:
        return []

    def start(self, arguments: list[str], environment: Environment) -> None:
        share = self._ranks.roles[ROLLOUT][0]
        # The devices in the rank map are those that CUDA_VISIBLE_DEVICES gave this process; there is no step to ask.
        gpus = visible_gpus(self._ranks.topology, share.node, share.gpus, {})
        self._temporary = take_temporary()
        own = {**environment[share.node], **gpus, "TMPDIR": str(self._temporary.path)}
        variables = without_gpu_choice({**os.environ, **own})
        with self._lock:  # another thread may look for ends already
            self._engines = EngineRanks(self._run_dir, self._ranks, share.node, arguments, variables)
            self._engines.start()

    def ended(self) -> list[tuple[int, str]]:
        with self._lock:
            # What `stop` ends is no news, though another thread still looks.
            return self._engines.ended() if self._engines and not self._stopping else []

    def end(self, engine: int) -> None:
        with self._lock:
            if self._engines is not None:
                self._engines.end(engine)

    def gone(self, engine: int) -> bool:
        with self._lock:
            return self._engines is None or self._engines.gone(engine)

    def start_again(self, engine: int, node: str) -> None:
        with self._lock:
            if self._engines is not None and not self._stopping:
                self._engines.start_again(engine)

    def stop(self, done: bool, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
        engines = self._engines
        if engines is None:
            return
        if done:
            wait_until(lambda: not engines.running, grace_s, 0.02, 0.02)
        engines.kill()
        if self._temporary is not None:
            self._temporary.remove()

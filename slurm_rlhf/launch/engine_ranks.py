"""The engines of one node as processes that do not know of each other: one that ends takes none with it.

A role's torchrun ends all of its processes when one of them ends. Engines that only answer prompts are better apart:
each rank is a child of its own, and only the ranks of one engine end together.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.cluster.processes import STORE_FD
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.launch.child_process import exit_text, start_child
from slurm_rlhf.launch.step_spec import WORKER_MODULE, share_on
from slurm_rlhf.placement.rank_map import RankMap, TpGroup

LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class _Engine:
    group: TpGroup
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    how: str = ""  # it ended


class EngineRanks:
    """Starts and watches the ranks of the engines on one node. Used by one thread, which must outlive them."""

    def __init__(
        self, run_dir: Path, ranks: RankMap, node: str, arguments: list[str], environment: Mapping[str, str]
    ) -> None:
        """`arguments`: of every rank; `environment`: the whole one of every rank, but for what tells them apart."""
        self._logs = run_dir / "logs"
        self._node = node
        self._share = share_on(ranks, ROLLOUT, node)
        self._arguments = [*arguments, f"--first_rank={self._share.ranks[0]}", f"--world={ranks.world(ROLLOUT)}"]
        self._environment = dict(environment)
        groups = [group for group in ranks.tp_groups if group.role == ROLLOUT and group.node == node]
        self._engines = [_Engine(group) for group in groups]

    def start(self) -> None:
        """Start all ranks."""
        for engine in self._engines:
            self._start(engine)

    def _start(self, engine: _Engine) -> None:
        """Start the ranks of an engine; where there are several, the first opens the store at which they meet.

        The port is bound here, and the socket handed down: no other process can take it in between.
        """
        with socket.create_server((LOOPBACK, 0)) as store:
            for tp_rank, rank in enumerate(engine.group.ranks):
                variables = {
                    **self._environment,
                    "LOCAL_RANK": str(self._share.ranks.index(rank)),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(store.getsockname()[1]),
                }
                opens = tp_rank == 0 and len(engine.group.ranks) > 1
                if opens:
                    variables[STORE_FD] = str(store.fileno())
                log = self._logs / f"{ROLLOUT}.{self._node}.{rank}.start.log"
                command = [sys.executable, "-m", WORKER_MODULE, *self._arguments]
                fds = (store.fileno(),) if opens else ()
                engine.ranks.append(start_child(command, log, variables, pass_fds=fds))

    def ended(self) -> list[tuple[int, str]]:
        """Return (engine, how) of the engines that ended since the last call; ranks that are left of one are ended."""
        news = []
        for engine in self._engines:
            if engine.how:
                continue
            for process, rank in zip(engine.ranks, engine.group.ranks, strict=True):
                code = process.poll()
                if code is not None:
                    engine.how = f"rank {rank} on {self._node} (pid {process.pid}) {exit_text(code)}"
                    news.append((engine.group.engine, engine.how))
                    self._kill(engine)
                    break
        return news

    @property
    def running(self) -> bool:
        """Tell whether a rank is left."""
        return any(process.poll() is None for engine in self._engines for process in engine.ranks)

    def kill(self) -> None:
        """End every rank by force, and wait for it."""
        for engine in self._engines:
            self._kill(engine)
        for engine in self._engines:
            for process in engine.ranks:
                process.wait()

    @staticmethod
    def _kill(engine: _Engine) -> None:
        for process in engine.ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def plain_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with `variables` over it."""
    return {**os.environ, **variables}

"""Start and watch the ranks of the engines on one node."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.cluster.network import LOOPBACK
from slurm_rlhf.cluster.processes import CONDUCTOR_GONE_STATUS, STORE_FD, exit_text
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.nodes.child_process import start_child
from slurm_rlhf.nodes.facts import WORKER_MODULE, share_on
from slurm_rlhf.placement.rank_map import RankMap, TpGroup


@dataclass(slots=True)
class _Engine:
    group: TpGroup
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    how: str = ""  # how the engine ended; empty: it runs


class EngineRanks:
    """Starts and watches the ranks of the engines on one node. Used by one thread, which must outlive them.

    A role's torchrun ends all of its processes when one of them ends. Engines that only answer prompts are better
    apart: each rank is a child of its own, and only the ranks of one engine end together.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: RankMap,
        node: str,
        arguments: list[str],
        environment: Mapping[str, str],
        only: Sequence[int] | None = None,
    ) -> None:
        """`arguments`: of every rank; `environment`: the whole one of every rank, but for what tells them apart.

        `only`: the engines of the node that this is about; None: all.
        """
        self._logs = run_dir / "logs"
        self._node = node
        self._share = share_on(ranks, ROLLOUT, node)
        self._arguments = [*arguments, f"--world={ranks.world(ROLLOUT)}"]
        self._environment = dict(environment)
        groups = [group for group in ranks.tp_groups if group.role == ROLLOUT and group.node == node]
        self._engines = {group.engine: _Engine(group) for group in groups if only is None or group.engine in only}

    def start(self) -> None:
        """Start all ranks."""
        for engine in self._engines.values():
            self._start(engine)

    def _start(self, engine: _Engine) -> None:
        """Start the ranks of an engine; where there are several, the first opens the store at which they meet.

        The port is bound here, and the socket handed down: no other process can take it in between.
        """
        with socket.create_server((LOOPBACK, 0)) as store:
            for tp_rank, rank in enumerate(engine.group.ranks):
                local = self._share.ranks.index(rank)
                variables = {
                    **self._environment,
                    "LOCAL_RANK": str(local),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(store.getsockname()[1]),
                }
                opens = tp_rank == 0 and len(engine.group.ranks) > 1
                if opens:
                    variables[STORE_FD] = str(store.fileno())
                log = self._logs / f"{ROLLOUT}.{self._node}.{rank}.start.log"
                # A worker adds the two; where an engine has moved to another node the ranks here have gaps.
                command = [sys.executable, "-m", WORKER_MODULE, *self._arguments, f"--first_rank={rank - local}"]
                fds = (store.fileno(),) if opens else ()
                engine.ranks.append(start_child(command, log, variables, pass_fds=fds))

    def ended(self) -> list[tuple[int, str]]:
        """Return (engine, how) of the engines that ended since the last call; ranks that are left of one are ended."""
        news = []
        for engine in self._engines.values():
            if engine.how:
                continue
            ranks = zip(engine.ranks, engine.group.ranks, strict=True)
            gone = [(code, rank, process.pid) for process, rank in ranks if (code := process.poll()) is not None]
            if gone:
                code, rank, pid = min(gone)  # a signal first: a rank whose peer is gone ends by itself
                engine.how = (
                    f"rank {rank} of engine {engine.group.engine} on {self._node} (pid {pid}) {exit_text(code)}"
                )
                news.append((engine.group.engine, engine.how))
                self._kill(engine)
        return news

    @property
    def running(self) -> bool:
        """Tell whether a rank is left."""
        return any(not self.gone(number) for number in self._engines)

    @property
    def deserted(self) -> bool:
        """Tell whether a rank has left because it heard nothing of the conductor."""
        ranks = (process for engine in self._engines.values() for process in engine.ranks)
        return any(process.poll() == CONDUCTOR_GONE_STATUS for process in ranks)

    def has(self, number: int) -> bool:
        """Tell whether a rank of an engine is left here."""
        return number in self._engines and not self.gone(number)

    def gone(self, number: int) -> bool:
        """Tell whether no rank of an engine is left."""
        return all(process.poll() is not None for process in self._engines[number].ranks)

    def end(self, number: int, how: str = "") -> None:
        """End what is left of an engine by force; `ended` tells of it, unless `how` does already."""
        engine = self._engines[number]
        engine.how = engine.how or how
        self._kill(engine)

    def kill(self) -> None:
        """End every rank by force, and wait for it."""
        for engine in self._engines.values():
            self._kill(engine)
        for engine in self._engines.values():
            for process in engine.ranks:
                process.wait()

    @staticmethod
    def _kill(engine: _Engine) -> None:
        for process in engine.ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

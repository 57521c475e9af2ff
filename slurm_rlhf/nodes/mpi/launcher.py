"""Implement the launcher under MPI: the agents exist already, one for each rank, and start what the conductor says."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.processes import KEYS
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.agent_steps import AgentServer
from slurm_rlhf.nodes.facts import Orders, StepSpec
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.messages import Peer


class MpiAgents(AgentServer):
    """Knows the agents of the ranks, which exist already and wait for their orders."""

    def __init__(self, run_dir: Path, address: str, timeout: Timeout, orders: int) -> None:
        """`orders`: number of a file; what is written there reaches all ranks."""
        super().__init__(run_dir, address, timeout)
        self._orders = orders
        self.news: deque[Ended] = deque()

    def begin(self, orders: Orders) -> None:
        with open(self._orders, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(orders)) + "\n")

    def _note(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        if event == "here":
            self.residents.setdefault(peer.host, peer)
        else:
            log = RunDirectory(self.run_dir).role_log(peer.role, f"{peer.host}.mpi", peer.rank)
            self.news.append(Ended(peer.role, peer.host, str(data["how"]), log))

    def _lose(self, peer: Peer) -> None:
        how = "was ended by the MPI launcher, which ends all ranks when one is gone; its own output names it"
        self.news.append(Ended(peer.role, peer.host, how, Path("/dev/null")))


class MpiLauncher:
    """Implement `nodes.launcher.Launcher` in the conductor, a child of rank 0.

    No role can be started again: a rank that is gone is missing in COMM_WORLD.
    """

    fixed = "under MPI no role can be started again: a rank that is gone is missing in MPI_COMM_WORLD"
    unfit: Mapping[str, str] = {}
    engines = None  # none can be started again

    def __init__(self, agents: MpiAgents, ranks: RankMap) -> None:
        self.agents = agents
        self._ranks = ranks
        self.address = agents.address
        self._run_id = secrets.token_hex(6)

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        first, *others = self.agents.server.wait_for(role, self._ranks.world(role), self.agents.timeout.start)
        directory = RunDirectory(self.agents.run_dir)
        keys = directory.keys.read_text(encoding="utf-8")
        own = {node: {**variables, KEYS: keys} for node, variables in environment.items()}
        spec = StepSpec(role, str(directory.root), self._run_id, arguments, own)

        def start_others(answer: Future[str]) -> None:
            for peer in others if answer.exception() is None else ():
                self.agents.start_there(peer, replace(spec, store=answer.result()), self._ranks)

        self.agents.start_there(first, spec, self._ranks).add_done_callback(start_others)

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        raise RunError(self.fixed)

    def ended(self) -> list[Ended]:
        return [self.agents.news.popleft() for _ in range(len(self.agents.news))]

    def stop(self, done: bool, grace_s: float) -> None:
        """Let all ranks leave, or end them; their agents leave MPI together."""
        for peer in self._present():
            self.agents.call(peer, "leave")
        if done:
            wait_until(lambda: not self._present(), grace_s, 0.05, 0.05)
        wait([self.agents.call(peer, "kill", [peer.role]) for peer in self._present()], timeouts.MPI_CLOSED_S)
        self.agents.close()

    def _present(self) -> list[Peer]:
        return [peer for role in self._ranks.roles for peer in self.agents.server.peers(role) if not peer.lost]

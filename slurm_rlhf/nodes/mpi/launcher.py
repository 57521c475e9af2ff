"""Implement the launcher under MPI: the agents exist already, one for each rank, and start what the conductor says."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.processes import KEYS
from slurm_rlhf.config.schema import Timeout
from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.agent_server import AgentServer
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.step_spec import StepSpec
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.messages import Peer


class MpiLauncher:
    """Implement `nodes.launcher.Launcher` in the conductor, a child of rank 0.

    No role can be started again: a rank that is gone is missing in COMM_WORLD.
    """

    fixed = "under MPI no role can be started again: a rank that is gone is missing in MPI_COMM_WORLD"
    unfit: Mapping[str, str] = {}
    engines = None  # none can be started again

    def __init__(self, run_dir: Path, ranks: RankMap, address: str, timeout: Timeout) -> None:
        self._directory = RunDirectory(run_dir)
        self._ranks = ranks
        self._start_s = timeout.start
        self.address = address
        self._run_id = secrets.token_hex(6)
        self._news: deque[Ended] = deque()
        self.agents = AgentServer(address, self._note, self._lose, timeout.heartbeat_interval, timeout.heartbeat)

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        first, *others = self.agents.server.wait_for(role, self._ranks.world(role), self._start_s)
        keys = self._directory.keys.read_text(encoding="utf-8")
        own = {node: {**variables, KEYS: keys} for node, variables in environment.items()}
        spec = StepSpec(role, str(self._directory.root), self._run_id, arguments, own)

        def start_others(answer: Future[str]) -> None:
            for peer in others if answer.exception() is None else ():
                self._start(peer, replace(spec, store=answer.result()))

        self._start(first, spec).add_done_callback(start_others)

    def _start(self, peer: Peer, spec: StepSpec) -> Future[str]:
        return self.agents.call(peer, "start", (spec, self._ranks.to_json()), str)

    def _note(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        if event == "ended":
            log = self._directory.role_log(peer.role, f"{peer.host}.mpi", peer.rank)
            self._news.append(Ended(peer.role, peer.host, str(data["how"]), log))

    def _lose(self, peer: Peer) -> None:
        how = "was ended by the MPI launcher, which ends all ranks when one is gone; its own output names it"
        self._news.append(Ended(peer.role, peer.host, how, Path("/dev/null")))

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        raise RunError(self.fixed)

    def ended(self) -> list[Ended]:
        return [self._news.popleft() for _ in range(len(self._news))]

    def stopped(self) -> list[tuple[str, int]]:
        return []  # ranks are children of the MPI launcher

    def look(self, pids: Mapping[str, Sequence[int]], directory: Path, within_s: float) -> None:
        self.agents.look({peer.host: peer for peer in self._present()}, pids, directory, within_s)

    def unreached(self, nodes: Sequence[str]) -> list[str]:
        return []  # nothing can be started anywhere

    def stop(self, done: bool, grace_s: float) -> None:
        """Let all ranks leave, or end them; their agents leave MPI together."""
        for peer in self._present():
            self.agents.call(peer, "leave")
        if done:
            wait_until(lambda: not self._present(), grace_s, 0.05, 0.05)
        wait([self.agents.call(peer, "kill") for peer in self._present()], timeouts.MPI_CLOSED_S)
        self.agents.close()

    def _present(self) -> list[Peer]:
        return [peer for role in self._ranks.roles for peer in self.agents.server.peers(role) if not peer.lost]

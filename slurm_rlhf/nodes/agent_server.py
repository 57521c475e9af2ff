"""The conductor's end of the connections to agents, whoever has started them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.nodes.facts import Orders, StepSpec
from slurm_rlhf.nodes.node_look import NodeView
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.codec import decode
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Peer
from slurm_rlhf.workers.pool import WorkerNodes


class AgentServer(ABC):
    """Starts an agent on each node and listens for it; agents have keys of their own. Any thread may use it."""

    def __init__(self, run_dir: Path, address: str, timeout: Timeout) -> None:
        """Listen on `address` alone. Raises RunError where that is none of this node."""
        self.run_dir = run_dir
        self.timeout = timeout
        self.residents: dict[str, Peer] = {}
        """Node -> its agent, from before a run to its end."""
        self._keys = RunKeys.new()
        self.server = ControlServer(
            self._keys,
            host=address,
            heartbeat_interval=timeout.heartbeat_interval,
            heartbeat_limit=timeout.heartbeat,
            on_event=self._note,
            on_lost=self._lose,
        )
        self.address = address

    @abstractmethod
    def begin(self, orders: Orders) -> None:
        """Start an agent on each node; it does not wait for them. Raises RunError if that is not even begun."""

    @abstractmethod
    def _note(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        """Take the event of an agent, which is here, or tells how something ended that it has started."""

    def _lose(self, peer: Peer) -> None:
        """Take note that an agent is gone."""

    def said(self) -> str:
        """Return what agents printed, as one that does not reach this process, and the errors of what starts them."""
        return ""

    def over(self) -> bool:
        """Tell whether all agents have ended."""
        return False

    def orders(self, **what: Any) -> Orders:
        """Return what lets an agent connect; `what`: other fields of its orders."""
        reached = self._keys.text(), self.address, self.server.port
        times = self.timeout.heartbeat_interval, self.timeout.heartbeat
        return Orders(*reached, str(self.run_dir.absolute()), *times, **what)

    def call(
        self, peer: Peer, method: str, argument: Any = None, result: Any = None, limit_s: float = timeouts.AGENT_S
    ) -> Future[Any]:
        """Call an agent, which answers with a `result`. Does not block."""
        reader = partial(decode, declared=result, name=f"the answer to {method}")
        return self.server.call(peer.role, peer.rank, method, argument, limit_s, reader)

    def start_there(self, peer: Peer, spec: StepSpec, ranks: RankMap) -> Future[str]:
        """Let an agent start `spec`; the Future has where others find it. Does not block."""
        return self.call(peer, "start", (spec, ranks.to_json()), str)

    def look(self, pids: Mapping[str, Sequence[int]], within_s: float) -> list[NodeView]:
        """Return what each node sees of its processes `pids[node]`. A node may be missing.

        The watchdog calls it, from its thread, when a run hangs. Blocks for `within_s` at most; raises OSError and
        RunError.
        """
        known = [node for node in pids if node in self.residents]
        calls = [self.call(self.residents[node], "look", list(pids[node]), NodeView) for node in known]
        done, _ = wait(calls, within_s)
        return [call.result() for call in done if call.exception() is None]

    def worker_nodes(self, tell: Callable[[str], None]) -> WorkerNodes:
        """Start agents on the nodes that are kept for workers, and return these; `tell` tells the user of lost ones."""
        return ()

    def unheard(self, seconds: float) -> set[str]:
        """Return the nodes that were heard once, and of which no agent was heard for `seconds`. Does not block."""
        silent = self.server.silent(seconds)
        return {
            node
            for node in self.residents
            if not self.over() and all(peer.lost or peer in silent for peer in self.server.peers_on(node))
        }

    def close(self) -> None:
        """Say goodbye: agents that are left end what they have started, and themselves."""
        self.server.close()

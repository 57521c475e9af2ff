"""The conductor's end of the connections to agents, whoever has started them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.nodes.facts import Orders
from slurm_rlhf.nodes.node_look import NodeView
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.codec import decode
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Peer


class AgentServer:
    """Listens for agents, which have keys of their own, and calls them. Any thread may use it."""

    def __init__(
        self,
        address: str,
        on_event: Callable[[Peer, str, dict[str, Any]], None],
        on_lost: Callable[[Peer], None] | None = None,
        beat_s: float = timeouts.AGENT_BEAT_S,
        silent_s: float = timeouts.AGENT_SILENT_S,
    ) -> None:
        """Listen on `address` alone. Raises RunError where that is none of this node."""
        keys = RunKeys.new()
        self._times = beat_s, silent_s
        self.server = ControlServer(
            keys,
            host=address,
            heartbeat_interval=beat_s,
            heartbeat_limit=silent_s,
            on_event=on_event,
            on_lost=on_lost,
        )
        self._reached = (keys.text(), address, self.server.port)

    def orders(self, run_dir: Path | str, **what: Any) -> Orders:
        """Return what lets an agent connect; `what`: other fields of its orders."""
        beat_s, silent_s = self._times
        return Orders(*self._reached, str(run_dir), beat_s=beat_s, silent_s=silent_s, **what)

    def call(
        self, peer: Peer, method: str, argument: Any = None, result: Any = None, limit_s: float = timeouts.AGENT_S
    ) -> Future[Any]:
        """Call an agent, which answers with a `result`. Does not block."""
        reader = partial(decode, declared=result, name=f"the answer to {method}")
        return self.server.call(peer.role, peer.rank, method, argument, limit_s, reader)

    def look(
        self, peers: Mapping[str, Peer], pids: Mapping[str, Sequence[int]], directory: Path, within_s: float
    ) -> None:
        """Write into `directory` what each node sees of its processes, as far as it comes in time. Raises OSError."""
        calls = [self.call(peers[node], "look", list(pids[node]), NodeView) for node in pids if node in peers]
        done, _ = wait(calls, within_s)
        for call in done:
            if call.exception() is None:
                call.result().write(directory)

    def close(self) -> None:
        """Say goodbye: agents that are left end what they have started, and themselves."""
        self.server.close()

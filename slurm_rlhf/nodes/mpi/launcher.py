"""Implement the launcher under MPI: the ranks exist already, and rank 0 tells them what to start."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.node_look import look
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

_POLL_S = 0.05


class Channel:
    """Exchange lines of JSON between the conductor and rank 0 over a pair of sockets.

    `receive` never blocks; `send` blocks while the other end does not read.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._read = b""
        self.closed = False
        """True once the other end is gone."""

    def send(self, **message: Any) -> None:
        """Send a message; nothing happens if the other end is gone."""
        try:
            self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, oldest first."""
        while not self.closed:
            try:
                data = self._end.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            self._read += data
        *lines, self._read = self._read.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._end.close()


class MpiLauncher:
    """Implement `nodes.launcher.Launcher` in the conductor, a child of rank 0; `channel` leads to rank 0.

    No role can be started again: a rank that is gone is missing in COMM_WORLD.
    """

    fixed = "under MPI no role can be started again: a rank that is gone is missing in MPI_COMM_WORLD"
    unfit: Mapping[str, str] = {}
    engines = None  # none can be started again

    def __init__(self, channel: Channel, ranks: RankMap, address: str) -> None:
        self._channel = channel
        self._ranks = ranks
        self.address = address
        self._lock = threading.Lock()
        self._reported = False  # True once rank 0 is reported as gone, or was ordered to stop

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        self._channel.send(start=role, arguments=arguments, environment=environment)

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        raise RunError(self.fixed)

    def ended(self) -> list[Ended]:
        with self._lock:
            reports = [message["ended"] for message in self._channel.receive()]
            news = [Ended(role, node, how, Path(log)) for role, node, how, log in reports]
            if self._channel.closed and not self._reported:
                self._reported = True
                role, shares = next(iter(self._ranks.roles.items()))
                how = "was ended by the MPI launcher, which ends all ranks when one is gone; its own output names it"
                news.append(Ended(role, shares[0].node, how, Path("/dev/null")))
        return news

    def stopped(self) -> list[tuple[str, int]]:
        return []  # they are children of others

    def look(self, pids: Mapping[str, Sequence[int]], directory: Path, within_s: float) -> None:
        """Look at the ranks of this node alone: no other process of the run can start anything elsewhere."""
        here = node_name()
        if here in pids:
            look(here, pids[here]).write(directory)

    def unreached(self, nodes: Sequence[str]) -> list[str]:
        return []  # as above

    def stop(self, done: bool, grace_s: float) -> None:
        """Tell rank 0 to stop all ranks; it closes the channel when every worker is gone."""
        with self._lock:
            self._reported = True
        self._channel.send(stop=grace_s if done else 0.0)
        wait_until(self._closed, grace_s + timeouts.MPI_CLOSED_S, _POLL_S, _POLL_S)

    def _closed(self) -> bool:
        with self._lock:
            self._channel.receive()
            return self._channel.closed

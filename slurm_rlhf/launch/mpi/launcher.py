"""The ranks of COMM_WORLD, as the conductor sees them: they are there already, and are told what to be."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_rlhf.launch.channel import Channel
from slurm_rlhf.launch.launcher import Ended
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until

_POLL_S = 0.05
_LATE_S = 10.0


class MpiLauncher:
    """Implements `cluster.launcher.Launcher` in the child of rank 0 that is the conductor; `channel` leads to rank 0.

    No role can be started anew: a rank that is gone is missing in COMM_WORLD.
    """

    def __init__(self, channel: Channel, ranks: RankMap, address: str) -> None:
        self._channel = channel
        self._ranks = ranks
        self._address = address
        self._lock = threading.Lock()
        self._news: list[Ended] = []
        self._gone = self._told = False

    @property
    def address(self) -> str:
        return self._address

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        self._channel.send(start=role, arguments=arguments, environment=environment)

    def ended(self) -> list[Ended]:
        with self._lock:
            self._listen()
            news, self._news = self._news, []
        return news

    def stop(self, done: bool, grace_s: float) -> None:
        self._channel.send(stop=True, grace_s=grace_s if done else 0.0)
        wait_until(self._left, grace_s + _LATE_S, _POLL_S, _POLL_S)

    def _left(self) -> bool:
        with self._lock:
            self._listen()
            return self._gone or self._channel.closed

    def _listen(self) -> None:
        for words in self._channel.receive():
            self._gone = self._gone or "gone" in words
            if "ended" in words:
                self._news.append(_ended(words["ended"]))
        if self._channel.closed and not self._gone and not self._told:
            self._told = True
            role, shares = next(iter(self._ranks.roles.items()))
            how = "was ended by the MPI launcher, as it does with all ranks when one is gone; its own output names it"
            self._news.append(Ended(role, shares[0].node, how, Path("/dev/null")))


def _ended(words: dict[str, Any]) -> Ended:
    return Ended(words["role"], words["node"], words["how"], Path(words["log"]))

"""Serves environments over HTTP, in the workers of this machine: what `slurm-rlhf serve-env` runs. And its client.

POST {"method", "episode", "arguments", "timeout_s"} -> {"value"}: a call of `kinds.Instances`, whose records are plain
values. `episode` is a name that the client makes up: `begin` gives it a process, in which it lives until `end`, until a
call fails, or until `drop`, which gives it up.
"""

from __future__ import annotations

import itertools
import secrets
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from slurm_rlhf.errors import WorkerError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http import Servers, WorkServer
from slurm_rlhf.workers.pool import ENDED, GONE, Lease, WorkerPool


@dataclass(slots=True)
class _Played:
    lease: Lease
    number: int
    called: float = 0.0  # when the last call began


class EnvironmentServer(WorkServer):
    """Plays the episodes of any number of runs."""

    beat_s = timeouts.SERVER_BEAT_S

    def __init__(self, address: tuple[str, int], pool: WorkerPool, timeout_s: float, serves: str, token: str) -> None:
        """`timeout_s`: of a call, at most; the other arguments as in `WorkServer`."""
        super().__init__(address, pool, timeout_s, serves, token)
        self._numbers, self._lock = itertools.count(), Lock()
        self._played: dict[str, _Played] = {}  # episode -> where it is; the one that was called last stands last

    def begin(self, body: dict[str, Any]) -> Future[Any]:
        method, timeout_s = body["method"], min(float(body["timeout_s"]), self.timeout_s)
        if method == "describe":
            return self.pool.submit(method, timeout_s=timeout_s)
        if method not in ("begin", "turn", "end", "drop"):
            raise ValueError(f"no such method: {method!r}")
        episode, arguments = str(body["episode"]), list(body["arguments"])
        if method == "begin":
            self._forget_old()
            played = _Played(self.pool.lease(), next(self._numbers))
        elif (found := self._taken(episode)) is None:
            raise WorkerError(GONE, "the episode is not known here: the server is another one, or it was forgotten")
        else:
            played = found
        played.called = time.monotonic()
        with self._lock:
            self._played[episode] = played
        call = played.lease.submit(method, played.number, *arguments, timeout_s=timeout_s)
        call.add_done_callback(partial(self._called, method, episode))
        return call

    def said(self, answer: Any) -> Any:
        return {"value": answer}

    def _taken(self, episode: str) -> _Played | None:
        with self._lock:
            return self._played.pop(episode, None)

    def _called(self, method: str, episode: str, call: Future[Any]) -> None:
        """Forget an episode that is over: it has ended, was given up, or a call of it has failed."""
        over = method in ("end", "drop") or call.cancelled() or call.exception() is not None
        if over and (played := self._taken(episode)) is not None:
            self._forget(played)

    def _forget_old(self) -> None:
        """Forget the episodes of runs that have ended without a word; those that were called last stand last."""
        until = time.monotonic() - timeouts.EPISODE_IDLE_S
        with self._lock:
            old = [*itertools.takewhile(lambda name: self._played[name].called < until, self._played)]
        for played in filter(None, map(self._taken, old)):
            self._forget(played)

    def _forget(self, played: _Played) -> None:
        with suppress(WorkerError):  # the pool is closed
            call = played.lease.submit("drop", played.number, timeout_s=self.timeout_s)
            call.add_done_callback(lambda call: played.lease.end())


class RemoteLease:
    """Calls the server that has answered `begin`; then every call raises WorkerError of kind `gone` if it is away.

    Before, a call waits while no server answers.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers, self._server, self._episode = servers, "", secrets.token_hex(16)

    def submit(self, method: str, *arguments: Any, timeout_s: float) -> Future[Any]:
        """As `Lease.submit`; the server has numbers of its own."""
        if method == "drop" and not self._server:  # it is over, or never began
            over: Future[Any] = Future()
            over.set_result(None)
            return over
        body = {"method": method, "episode": self._episode, "arguments": arguments[1:], "timeout_s": timeout_s}
        try:
            return self._servers.requests.submit(self._ask, body)
        except RuntimeError as error:  # its threads have ended
            raise WorkerError(ENDED, "the connections to the servers were closed") from error

    def end(self) -> None:
        """Return: the server has forgotten the episode by itself."""

    def _ask(self, body: dict[str, Any]) -> Any:
        server, self._server = self._server, ""
        server, answer = self._servers.ask(body, server)
        if body["method"] in ("begin", "turn"):
            self._server = server
        return answer["value"]

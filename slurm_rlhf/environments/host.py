"""Plays the environments of many episodes in the processes of a pool, here or on servers; and serves them.

`slurm-rlhf serve-env` runs the server: POST {"method", "episode", "arguments", "timeout_s"} -> {"value"}, a call of
`kinds.Instances`, whose records are plain values. `episode` is a name that the client makes up: `begin` gives it a
process, in which it lives until `end`, until a call fails, or until `drop`, which gives it up.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec

from slurm_rlhf.config.schema import Config
from slurm_rlhf.environments.kinds import Instances
from slurm_rlhf.environments.records import Answer, Begun, EnvironmentInfo, Start, Turn
from slurm_rlhf.errors import EpisodeError, WorkerError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http import Servers, WorkServer, servers_of, token_of
from slurm_rlhf.workers.pool import ENDED, GONE, LATE, RAISED, Code, Lease, WorkerNodes, WorkerPool, of_load


@dataclass(slots=True)
class _Played:
    lease: Lease
    number: int
    called: float = 0.0  # when the last call began


class EnvironmentServer(WorkServer):
    """Plays the episodes of any number of runs."""

    beat_s = timeouts.SERVER_BEAT_S

    def __init__(self, address: tuple[str, int], pool: WorkerPool, timeout_s: float, serves: str, token: str) -> None:
        """`timeout_s`: longest time-out of a call; the other arguments as in `WorkServer`."""
        super().__init__(address, pool, timeout_s, serves, token)
        self._numbers, self._lock = itertools.count(), Lock()
        self._played: dict[str, _Played] = {}  # episode -> where it is, in the order of last calls

    def begin(self, body: dict[str, Any]) -> Future[Any]:
        method, timeout_s = body["method"], min(float(body["timeout_s"]), self.timeout_s)
        if method == "describe":
            return self.pool.submit(method, timeout_s=timeout_s)
        if method not in ("begin", "turn", "end", "drop"):
            raise ValueError(f"no such method: {method!r}")
        episode, arguments = str(body["episode"]), list(body["arguments"])
        played = self._taken(episode)
        if method == "begin":
            self._forget_old()
            played = _Played(self.pool.lease(), next(self._numbers))
        if played is None:
            raise WorkerError(GONE, "the episode is not known here: the server is another one, or it was forgotten")
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
            _drop(played.lease, played.number, self.timeout_s)

    def _forget_old(self) -> None:
        """Forget the episodes of runs that have ended without a word; `_played` is in the order of last calls."""
        until = time.monotonic() - timeouts.EPISODE_IDLE_S
        with self._lock:
            old = [*itertools.takewhile(lambda name: self._played[name].called < until, self._played)]
        for played in filter(None, map(self._taken, old)):
            _drop(played.lease, played.number, self.timeout_s)


class RemoteLease:
    """Calls the environment of one episode on a server.

    Until a server has answered `begin`, a call waits; after that it raises WorkerError of kind `gone` if that is away.
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


T = TypeVar("T")
AT_ONCE = 256
"""Most calls to servers in flight."""


def _drop(lease: Lease | RemoteLease, number: int, timeout_s: float) -> list[Future[Any]]:
    """Give an episode up, over or not, and its place with it; return the call, none if the pool is closed."""
    with suppress(WorkerError):
        call = lease.submit("drop", number, timeout_s=timeout_s)
        call.add_done_callback(lambda call: lease.end())
        return [call]
    return []


def code_of(file: str, arguments: Sequence[str] = ()) -> Code:
    """Name what the processes make: the environments of a file, which gets `arguments` as a script does."""
    return Code(Instances.__module__, Instances.__name__, {"file": file, "arguments": arguments})


class ProcessLost(Exception):
    """Says that the process of an environment was ended by another environment in it, or that its server is away."""


@dataclass(frozen=True, slots=True)
class EpisodeCalls:
    """Calls the environment of one episode in its process. Each call may raise EpisodeError or ProcessLost.

    What an environment raises is an error of its episode alone. One that ends its process, or is late, takes the other
    episodes in it along: they begin anew.
    """

    host: Host
    lease: Lease | RemoteLease
    number: int

    async def begin(self, start: Start) -> Begun:
        """Begin the episode."""
        return await self._call(Begun, "begin", msgspec.structs.asdict(start))

    async def turn(self, turn: Turn) -> Answer:
        """Answer a turn."""
        return await self._call(Answer, "turn", msgspec.to_builtins(turn))

    async def end(self) -> Answer:
        """End the episode."""
        return await self._call(Answer, "end")

    def leave(self) -> list[Future[Any]]:
        """Forget the episode, over or not; return at once, with the call that frees what it holds."""
        return _drop(self.lease, self.number, self.host.timeout_s)

    async def _call(self, made: type[T], method: str, *arguments: Any) -> T:
        try:
            asked = self.lease.submit(method, self.number, *arguments, timeout_s=self.host.timeout_s)
            answer = await asyncio.wrap_future(asked)
        except WorkerError as error:
            if error.kind == GONE:
                raise ProcessLost from None
            file = "" if error.kind == RAISED or self.host.servers else f"{self.host.file}: "
            advice = "; make it faster or raise timeout.environment" if error.kind == LATE else ""
            raise EpisodeError(f"{file}{error}{advice}") from error
        return msgspec.convert(answer, made)


class Host:
    """Has the processes in which environments live, each with many of them."""

    def __init__(
        self, config: Config, printed: Path | None, note: Callable[[str], None], nodes: WorkerNodes = ()
    ) -> None:
        """Start the processes, on `nodes` or, where there are none, here, unless they are on servers.

        `printed`: the file for the output of environments; None: this process's output. `note` tells the user of
        servers that do not answer. Raises ConfigError.
        """
        env, self.timeout_s, self.start_s = config.env, config.timeout.environment, config.timeout.connect
        self.file = env.path
        self.servers: Servers | None = None
        if servers_of(env.path):
            token = token_of(env.token, "env.token")
            self.servers = Servers(env.path, token, note, at_once=AT_ONCE, silence_s=timeouts.SERVER_SILENT_S)
        else:
            self._pool = WorkerPool(code_of(env.path), env.workers, env.memory_mb, self.start_s, printed, nodes)

    def describe(self) -> dict[str, EnvironmentInfo]:
        """Describe each environment, once all processes have loaded the file. Raises EpisodeError."""
        try:
            if self.servers is None:
                self._pool.ready()
            lease = self._lease()
            found = lease.submit("describe", timeout_s=self.start_s).result()
            lease.end()
        except WorkerError as error:
            raise EpisodeError(of_load(self.file, error)) from error
        return msgspec.convert(found, dict[str, EnvironmentInfo])

    def calls_of(self, number: int) -> EpisodeCalls:
        """Choose a process for the environment of episode `number`."""
        return EpisodeCalls(self, self._lease(), number)

    def _lease(self) -> Lease | RemoteLease:
        return self._pool.lease() if self.servers is None else RemoteLease(self.servers)

    def close(self) -> None:
        """End the processes, and wait for them."""
        (self.servers or self._pool).close()

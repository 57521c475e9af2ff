"""Plays the environments of many episodes in the processes of a pool, here or on servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_rlhf.config.schema import Config
from slurm_rlhf.environments.kinds import Instances
from slurm_rlhf.environments.records import Answer, Begun, Start, Tools, Turn
from slurm_rlhf.environments.server import RemoteLease
from slurm_rlhf.errors import EpisodeError, WorkerError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http import Servers, servers_of, token_of
from slurm_rlhf.workers.pool import GONE, LATE, RAISED, Code, Lease, WorkerNodes, WorkerPool

T = TypeVar("T")
AT_ONCE = 256
"""Calls of servers that are in flight at most."""


def code_of(file: str) -> Code:
    """Name what the processes make: the environments of a file."""
    return Code(Instances.__module__, Instances.__name__, {"file": file})


class Homeless(Exception):
    """Says that the process of an environment was ended by another environment in it, or that its server is away."""


@dataclass(frozen=True, slots=True)
class Home:
    """Calls the environment of one episode in its process. Each call may raise EpisodeError or Homeless.

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

    def leave(self) -> None:
        """Forget the episode, over or not; return at once."""
        with suppress(WorkerError):  # the pool is closed
            call = self.lease.submit("drop", self.number, timeout_s=self.host.timeout_s)
            call.add_done_callback(lambda call: self.lease.end())

    async def _call(self, made: type[T], method: str, *arguments: Any) -> T:
        try:
            asked = self.lease.submit(method, self.number, *arguments, timeout_s=self.host.timeout_s)
            answer = await asyncio.wrap_future(asked)
        except WorkerError as error:
            if error.kind == GONE:
                raise Homeless from None
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

        `printed`: the file for what environments print; None: it is printed as usual. `note` tells the user of servers
        that do not answer. Raises ConfigError.
        """
        env, self.timeout_s, self.start_s = config.env, config.timeout.environment, config.timeout.connect
        self.file = env.path
        self.servers: Servers | None = None
        if servers_of(env.path):
            token = token_of(env.token, "env.token")
            self.servers = Servers(env.path, token, note, at_once=AT_ONCE, silence_s=timeouts.SERVER_SILENT_S)
        else:
            self._pool = WorkerPool(code_of(env.path), env.workers, env.memory_mb, self.start_s, printed, nodes)

    def describe(self) -> dict[str, Tools]:
        """Describe each environment, once all processes have loaded the file. Raises EpisodeError."""
        try:
            if self.servers is None:
                self._pool.ready()
            lease = self._lease()
            found = lease.submit("describe", timeout_s=self.start_s).result()
            lease.end()
        except WorkerError as error:
            raise EpisodeError(str(error)) from error
        return msgspec.convert(found, dict[str, Tools])

    def home(self, number: int) -> Home:
        """Choose a process for the environment of episode `number`."""
        return Home(self, self._lease(), number)

    def _lease(self) -> Lease | RemoteLease:
        return self._pool.lease() if self.servers is None else RemoteLease(self.servers)

    def close(self) -> None:
        """End the processes, and wait for them."""
        (self.servers or self._pool).close()

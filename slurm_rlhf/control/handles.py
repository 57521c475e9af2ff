"""A role, seen from the conductor's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from slurm_rlhf.config.schema_timeout import Timeout
from slurm_rlhf.control.deadlines import deadline
from slurm_rlhf.control.server import ControlServer
from slurm_rlhf.errors import RemoteError, RunError


class RoleHandle:
    """Calls the ranks of one role, each call with its method's deadline."""

    def __init__(self, server: ControlServer, role: str, world: int, timeout: Timeout) -> None:
        """`world`: the role's ranks. Raises nothing: ranks may still be starting (`ControlServer.wait_for`)."""
        self.role = role
        self.world = world
        self._server = server
        self._timeout = timeout
        self.watch: Callable[[int], Callable[[], None]] | None = None
        """Told the rank of each call, returns what to call when its answer is there."""

    def call(self, rank: int, method: str, /, **args: Any) -> Future[Any]:
        """`method(**args)` on one rank; the Future raises as that of `ControlServer.call`.

        Raises RunError for a method without deadline, WireError for arguments that cannot travel.
        """
        future = self._server.call(self.role, rank, method, timeout_s=deadline(self._timeout, method), **args)
        if self.watch is not None:
            ended = self.watch(rank)
            future.add_done_callback(lambda _: ended())
        return future

    def start_all(
        self, method: str, /, args_per_rank: Sequence[Mapping[str, Any]] | None = None, **shared: Any
    ) -> list[Future[Any]]:
        """`method` on all ranks at once, with the `shared` arguments and each rank's own; Futures in rank order."""
        if args_per_rank is not None and len(args_per_rank) != self.world:
            raise RunError(f"{method} got arguments for {len(args_per_rank)} ranks; {self.role} has {self.world}")
        own = args_per_rank if args_per_rank is not None else [{}] * self.world
        return [self.call(rank, method, **{**shared, **own[rank]}) for rank in range(self.world)]

    def call_all(
        self, method: str, /, args_per_rank: Sequence[Mapping[str, Any]] | None = None, **shared: Any
    ) -> list[Any]:
        """As `start_all`, then waits: results in rank order, or the first failure as soon as it happens.

        After one rank has failed the others may hang in a collective until their deadline: their calls are not
        waited for, and end by themselves.
        """
        return gather(self.start_all(method, args_per_rank, **shared))


class EngineHandle(RoleHandle):
    """A role made of engines, each of them called as one: by its number, through its first rank.

    `world` is the number of engines. `ready` are those that can be called; who starts them keeps it up to date.
    """

    def __init__(self, server: ControlServer, role: str, ranks: int, width: int, timeout: Timeout) -> None:
        """`ranks`: the role's; `width`: those of one engine."""
        super().__init__(server, role, ranks // width, timeout)
        self.width = width
        self.ready: list[int] = list(range(self.world))

    def call(self, engine: int, method: str, /, **args: Any) -> Future[Any]:
        """As `RoleHandle.call`, on an engine."""
        return super().call(engine * self.width, method, **args)


def gather(futures: Sequence[Future[Any]]) -> list[Any]:
    """Results in order. Raises as soon as one failed; of several failures a user's error first, it names the cause."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failures = [error for future in futures if future in done and (error := future.exception()) is not None]
    if failures:
        raise min(failures, key=lambda error: not (isinstance(error, RemoteError) and error.user_error))
    return [future.result() for future in futures]

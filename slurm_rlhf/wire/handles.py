"""Call the ranks of one role by its declared calls, as the conductor does: typed, and with the declared deadlines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, TypeVar, overload

from slurm_rlhf.algorithms.batching import Shard, shards
from slurm_rlhf.config.schema_cluster import Timeout
from slurm_rlhf.errors import RemoteError, RunError
from slurm_rlhf.records import Experience
from slurm_rlhf.wire.calls import EngineCalls, RankCalls, StacksAnswer, TrainerCalls
from slurm_rlhf.wire.codec import CallSpec, spec_of
from slurm_rlhf.wire.server import ControlServer

C = TypeVar("C")
A = TypeVar("A")
R = TypeVar("R")


class RoleHandle(Generic[C]):
    """Calls the ranks of one role; `C` is the class that declares the role's calls, such as `ActorCalls`.

    `handle.call(0, ActorCalls.logprobs, batch).result()`: the argument's and the result's types are those of the
    declaration, and so is the deadline.
    """

    def __init__(self, server: ControlServer, role: str, world: int, timeout: Timeout) -> None:
        """`world`: the role's ranks. Raises nothing: ranks may still be starting (`ControlServer.wait_for`)."""
        self.role = role
        self.world = world
        self._server = server
        self._timeout = timeout
        self._retired: Exception | None = None
        self.watchers: list[Callable[[int, str], Callable[[], None]]] = []
        """Each gets the rank and the name of every call, and returns what to call when the answer is there."""

    @overload
    def call(self, rank: int, method: Callable[[C], R], /) -> Future[R]: ...
    @overload
    def call(self, rank: int, method: Callable[[C, A], Future[R]], argument: A, /) -> Future[R]: ...
    @overload
    def call(self, rank: int, method: Callable[[C, A], R], argument: A, /) -> Future[R]: ...

    def call(self, rank: int, method: Any, argument: Any = None, /) -> Future[Any]:
        """Call a method on one rank; the Future raises as that of `ControlServer.call`.

        Raises RunError for an argument of another type than the declared one, WireError for one that cannot travel.
        """
        spec = spec_of(method)
        if not isinstance(argument, spec.argument or type(None)):
            wanted = spec.argument.__name__ if spec.argument else "no argument"
            raise RunError(f"{self.role}.{spec.name} takes {wanted}, and got a {type(argument).__name__}")
        future = self._send(self._rank(rank), spec, argument)
        for watch in self.watchers:
            ended = watch(self._rank(rank), spec.name)
            future.add_done_callback(lambda _, ended=ended: ended())  # type: ignore[misc]
        return future

    @overload
    def start_all(self, method: Callable[[C], R], /) -> list[Future[R]]: ...
    @overload
    def start_all(self, method: Callable[[C, A], R], argument: A, /) -> list[Future[R]]: ...

    def start_all(self, method: Any, argument: Any = None, /) -> list[Future[Any]]:
        """Call a method on all ranks with the same argument; returns Futures in rank order."""
        return [self.call(rank, method, argument) for rank in range(self.world)]

    def start_each(self, method: Callable[[C, A], R], arguments: Sequence[A], /) -> list[Future[R]]:
        """Call a method on all ranks, each with its own argument; returns Futures in rank order."""
        if len(arguments) != self.world:
            raise RunError(f"{method.__name__} got arguments for {len(arguments)} ranks; {self.role} has {self.world}")
        return [self.call(rank, method, argument) for rank, argument in enumerate(arguments)]

    @overload
    def call_all(self, method: Callable[[C], R], /) -> list[R]: ...
    @overload
    def call_all(self, method: Callable[[C, A], R], argument: A, /) -> list[R]: ...

    def call_all(self, method: Any, argument: Any = None, /) -> list[Any]:
        """Call a method on all ranks and wait for the results, in rank order, or for the first failure.

        After one rank has failed the others may hang in a collective until their deadline: their calls are not
        waited for, and end by themselves.
        """
        return gather(self.start_all(method, argument))

    def retire(self, error: Exception) -> None:
        """Let every later call through this handle raise `error`: its role goes on under another handle."""
        self._retired = error

    def phases(self) -> dict[int, str]:
        """Return what each rank is doing, as of its last heartbeat: rank -> phase."""
        return {peer.rank: peer.phase for peer in self._server.peers(self.role)}

    def names(self, rank: int) -> str:
        """Name a rank, with its node and process id."""
        found = [str(peer) for peer in self._server.peers(self.role) if peer.rank == rank]
        return found[0] if found else f"{self.role} rank {rank}"

    def shut_down(self, rank: int) -> Future[str]:
        """Ask one process of the role to end, an engine's followers included."""
        return self._send(rank, spec_of(RankCalls.shutdown))

    def stacks(self, rank: int) -> Future[StacksAnswer]:
        """Ask one process of the role where it stands, an engine's followers included."""
        return self._send(rank, spec_of(RankCalls.stacks))

    def written(self, rank: int) -> Future[None]:
        """Wait, whatever else it does, until a trainer has written what `save` has copied.

        No watcher hears of it: the rank and its accelerator are free meanwhile.
        """
        return self._send(rank, spec_of(TrainerCalls.written))

    def _send(self, rank: int, spec: CallSpec, argument: Any = None) -> Future[Any]:
        if self._retired is not None:
            refused: Future[Any] = Future()
            refused.set_exception(self._retired)
            return refused
        return self._server.call(self.role, rank, spec.name, argument, spec.seconds(self._timeout), spec.read_result)

    def _rank(self, number: int) -> int:
        """Return the rank that takes the calls to `number`."""
        return number


class EngineHandle(RoleHandle[EngineCalls]):
    """Calls the engines of a role, each by its number, through its first rank.

    `world` is the number of engines. `ready` are those that can be called; who starts them keeps it up to date.
    """

    def __init__(self, server: ControlServer, role: str, ranks: int, width: int, timeout: Timeout) -> None:
        """`ranks`: the role's; `width`: those of one engine."""
        super().__init__(server, role, ranks // width, timeout)
        self.width = width
        self.ready: list[int] = list(range(self.world))
        self.goes_on_without: Callable[[int, BaseException], bool] = lambda engine, error: False
        """Tells whether the run goes on without an engine whose call has failed; `EngineRecovery` decides."""
        self.give_up: Callable[[int, str], bool] = lambda engine, why: False
        """Gives an engine up, and says why; False: the run cannot do without it."""

    def _rank(self, number: int) -> int:
        return number * self.width


def send_shards(
    role: RoleHandle[C],
    method: Callable[[C, A], R],
    request: Callable[[Experience, list[list[int]]], A],
    whole: Experience,
    max_tokens: int,
) -> tuple[list[Shard], list[Future[R]]]:
    """Send every rank its part of a batch, cut by `shards` and packed by `request`; answer parts and calls in order."""
    parts = shards(whole, role.world, max_tokens)
    return parts, role.start_each(method, [request(part.experience, part.micro) for part in parts])


def gather(futures: Sequence[Future[R]]) -> list[R]:
    """Wait for results, in order. Raises as soon as one failed; of several failures a user's error, as the cause."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failures = [error for future in futures if future in done and (error := future.exception()) is not None]
    if failures:
        raise min(failures, key=lambda error: not (isinstance(error, RemoteError) and error.user_error))
    return [future.result() for future in futures]

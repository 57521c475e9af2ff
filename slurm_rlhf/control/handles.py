"""A role as the conductor calls it: typed calls to one rank, or to all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, TypeVar, overload

from slurm_rlhf.config.schema_cluster import Timeout
from slurm_rlhf.control import calls
from slurm_rlhf.control.call_spec import CallSpec, calls_of, spec_of
from slurm_rlhf.control.calls import EngineCalls, RankCalls
from slurm_rlhf.control.server import ControlServer
from slurm_rlhf.errors import RemoteError, RunError

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
        self.watch: Callable[[int], Callable[[], None]] | None = None
        """Gets the rank of each call, and returns what to call when the answer is there."""

    @overload
    def call(self, rank: int, method: Callable[[C], R], /) -> Future[R]: ...
    @overload
    def call(self, rank: int, method: Callable[[C, A], Future[R]], argument: A, /) -> Future[R]: ...
    @overload
    def call(self, rank: int, method: Callable[[C, A], R], argument: A, /) -> Future[R]: ...
    @overload
    def call(self, rank: int, method: str, /, **args: Any) -> Future[Any]: ...

    def call(self, rank: int, method: Any, argument: Any = None, /, **args: Any) -> Future[Any]:
        """Call a method on one rank; the Future raises as that of `ControlServer.call`.

        Raises RunError for an argument of another type than the declared one, WireError for one that cannot travel.
        """
        if isinstance(method, str):
            return self._call_by_name(rank, method, args)
        spec = spec_of(method)
        if not isinstance(argument, spec.argument or type(None)):
            wanted = spec.argument.__name__ if spec.argument else "no argument"
            raise RunError(f"{self.role}.{spec.name} takes {wanted}, and got a {type(argument).__name__}")
        return self._send(rank, spec.name, {} if argument is None else argument, spec.seconds(self._timeout), spec)

    @overload
    def start_all(self, method: Callable[[C], R], /) -> list[Future[R]]: ...
    @overload
    def start_all(self, method: Callable[[C, A], R], argument: A, /) -> list[Future[R]]: ...
    @overload
    def start_all(
        self, method: str, args_per_rank: Sequence[Mapping[str, Any]] | None = None, /, **shared: Any
    ) -> list[Future[Any]]: ...

    def start_all(self, method: Any, argument: Any = None, /, **shared: Any) -> list[Future[Any]]:
        """Call a method on all ranks with the same argument; Futures in rank order."""
        if isinstance(method, str):
            own = argument if argument is not None else [{}] * self.world
            self._check_count(method, own)
            return [self._call_by_name(rank, method, {**shared, **own[rank]}) for rank in range(self.world)]
        return [self.call(rank, method, *([] if argument is None else [argument])) for rank in range(self.world)]

    def start_each(self, method: Callable[[C, A], R], arguments: Sequence[A], /) -> list[Future[R]]:
        """Call a method on all ranks, each with its own argument; Futures in rank order."""
        self._check_count(method.__name__, arguments)
        return [self.call(rank, method, argument) for rank, argument in enumerate(arguments)]

    @overload
    def call_all(self, method: Callable[[C], R], /) -> list[R]: ...
    @overload
    def call_all(self, method: Callable[[C, A], R], argument: A, /) -> list[R]: ...
    @overload
    def call_all(
        self, method: str, args_per_rank: Sequence[Mapping[str, Any]] | None = None, /, **shared: Any
    ) -> list[Any]: ...

    def call_all(self, method: Any, argument: Any = None, /, **shared: Any) -> list[Any]:
        """As `start_all`, then waits: results in rank order, or the first failure as soon as it happens.

        After one rank has failed the others may hang in a collective until their deadline: their calls are not
        waited for, and end by themselves.
        """
        return gather(self.start_all(method, argument, **shared))

    def shut_down(self, rank: int) -> Future[str]:
        """Ask one process of the role to end, an engine's followers included."""
        spec = spec_of(RankCalls.shutdown)
        return self._server.send(self.role, rank, spec.name, {}, spec.seconds(self._timeout), spec.read_result)

    def _check_count(self, method: str, arguments: Sequence[Any]) -> None:
        if len(arguments) != self.world:
            raise RunError(f"{method} got arguments for {len(arguments)} ranks; {self.role} has {self.world}")

    def _rank(self, number: int) -> int:
        """The rank that a call to `number` goes to."""
        return number

    def _send(self, number: int, name: str, argument: Any, seconds: float, spec: CallSpec | None) -> Future[Any]:
        rank = self._rank(number)
        reads = spec.read_result if spec else lambda result: result
        future = self._server.send(self.role, rank, name, argument, seconds, reads)
        if self.watch is not None:
            ended = self.watch(rank)
            future.add_done_callback(lambda _: ended())
        return future

    def _call_by_name(self, rank: int, method: str, args: Mapping[str, Any]) -> Future[Any]:
        """Until all callers name declared methods."""
        known = {name: spec for kind in _KINDS for name, spec in calls_of(kind).items()}
        if method not in known:
            raise RunError(f"method {method!r} has no deadline; methods with one: {', '.join(sorted(known))}")
        return _as_before(self.role, method, self._send(rank, method, args, known[method].seconds(self._timeout), None))


_KINDS = (calls.ActorCalls, calls.CriticCalls, calls.RewardCalls, calls.ReferenceCalls, EngineCalls, RankCalls)


def _as_before(role: str, method: str, future: Future[Any]) -> Future[Any]:
    """What callers by name expect of the answers whose form has changed."""

    def old(answer: Any) -> Any:
        if method in ("logprobs", "values"):
            return {method: answer}
        if method == "start" and isinstance(answer, dict):
            return answer["parameters"] if role == "actor" else answer["note"] or None
        if method in ("sync_push", "sync_receive") and isinstance(answer, dict) and not answer["broken"]:
            return {name: value for name, value in answer.items() if name != "broken"}
        return answer

    if method not in ("logprobs", "values", "start", "sync_push", "sync_receive"):
        return future
    mapped: Future[Any] = Future()

    def copy(done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            mapped.set_exception(error)
        else:
            mapped.set_result(old(done.result()))

    future.add_done_callback(copy)
    return mapped


class EngineHandle(RoleHandle[EngineCalls]):
    """A role made of engines, each of them called as one: by its number, through its first rank.

    `world` is the number of engines. `ready` are those that can be called; who starts them keeps it up to date.
    """

    def __init__(self, server: ControlServer, role: str, ranks: int, width: int, timeout: Timeout) -> None:
        """`ranks`: the role's; `width`: those of one engine."""
        super().__init__(server, role, ranks // width, timeout)
        self.width = width
        self.ready: list[int] = list(range(self.world))

    def _rank(self, number: int) -> int:
        return number * self.width


def gather(futures: Sequence[Future[R]]) -> list[R]:
    """Results in order. Raises as soon as one failed; of several failures a user's error first, it names the cause."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failures = [error for future in futures if future in done and (error := future.exception()) is not None]
    if failures:
        raise min(failures, key=lambda error: not (isinstance(error, RemoteError) and error.user_error))
    return [future.result() for future in futures]

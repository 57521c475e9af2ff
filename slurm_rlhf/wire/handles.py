"""The conductor's end: it knows which ranks are there, and calls those of a role by its declared calls.

Calls are typed, and have the declared deadlines; replies come back as Futures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, TypeVarTuple, overload

from slurm_rlhf.algorithms.batching import Shard, shards
from slurm_rlhf.algorithms.layout import ROWS, Layout
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import CallTimeout, RemoteError, RoleDied, RunError, shortened
from slurm_rlhf.records import Experience
from slurm_rlhf.wire.calls import EngineCalls
from slurm_rlhf.wire.codec import CallSpec, Reader, encode, spec_of
from slurm_rlhf.wire.io_loop import IoLoop
from slurm_rlhf.wire.io_thread import to_parts
from slurm_rlhf.wire.messages import Flight, Peer, Said

log = logging.getLogger(__name__)


class ControlServer(IoLoop):
    """Calls ranks, and learns which of them are there.

    Any thread may use it. Its I/O thread does all sending and receiving; callbacks run on that thread, so they must
    return at once: while one runs, nobody is heard.

    Arrays of a call may change as soon as `call` returns; arrays of a reply are the caller's own.
    """

    def endpoint(self, host: str | None = None) -> str:
        """Return `tcp://host:port` for the ranks. `host`: their name for this node; None: the address it listens on."""
        return f"tcp://{host or self._host}:{self.port}"

    def counts(self) -> str:
        """Count, for the log, connections and messages that were refused."""
        return (
            f"{self.auth.refused} connections refused, {self.garbage} messages of no use, {self.replayed} replayed, "
            f"{self.late} replies too late"
        )

    def peers(self, role: str) -> list[Peer]:
        """Return the ranks of `role` that said hello, in rank order, lost ones included (`peer.lost`)."""
        with self._lock:
            return self._of_role(role)

    def peers_on(self, host: str) -> list[Peer]:
        """Return the newest peer of each rank that is on a node, lost ones included."""
        with self._lock:
            return [peer for peer in self._by_name.values() if peer.host == host]

    def give_up(self, role: str, rank: int, why: str) -> None:
        """Count a rank as lost because its launcher or the conductor says so; takes effect soon after this returns.

        Its calls fail with RoleDied, and another process may say hello in its place. `on_lost` is not called.
        """
        with self._lock:
            peer = self._by_name.get((role, rank))
        if peer is not None and not peer.lost:
            self._given_up.put((peer, why))
            self._wake()

    def silent(self, seconds: float) -> list[Peer]:
        """Return the ranks that are present and were not heard from for `seconds`, the most silent first."""
        now = self.now
        with self._lock:
            found = [peer for peer in self._present() if now - peer.heard > seconds]
        return sorted(found, key=lambda peer: peer.heard)

    def flights(self) -> list[Flight]:
        """Return the calls in flight, the longest first, except the calls `LOOKING`."""
        with self._lock:
            return self.pending.flights(self.now)

    def moves(self) -> int:
        """Count the answers and events of ranks so far: while it stays the same, none of them makes progress."""
        return self._moves

    def said(self) -> list[Said]:
        """Return the last messages but heartbeats, the oldest first."""
        return list(self._said)

    def quiet(self, peer: Peer) -> float:
        """Return for how many seconds `peer` was not heard from."""
        return self.now - peer.heard

    def wait_for(self, role: str, n: int, timeout_s: float) -> list[Peer]:
        """Wait until ranks 0 .. n-1 of `role` have said hello; return them in rank order.

        Raises CallTimeout naming the missing ranks, RoleDied when one of them is lost, or what `fail_role` was given.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._raise_if_closed(role)
                if role in self._broken:
                    raise self._broken[role]
                here = [peer for peer in self._of_role(role) if peer.rank < n]
                if lost := [peer for peer in here if peer.lost]:
                    raise RoleDied(f"{lost[0]} is lost: {lost[0].lost}", hang=lost[0].silent)
                if len(here) == n:
                    return here
                missing = sorted(set(range(n)) - {peer.rank for peer in here})
                if not self._lock.wait(end - time.monotonic()) and time.monotonic() >= end:
                    raise CallTimeout(
                        f"{role}: {len(here)} of {n} ranks said hello within {timeout_s:g} s; "
                        f"missing: {shortened(map(str, missing), 8)}; "
                        f"{self.auth.obstacle or 'their log files say why'}"
                    )

    def call(
        self,
        role: str,
        rank: int,
        method: str,
        argument: Any,
        timeout_s: float,
        read: Reader,
    ) -> Future[Any]:
        """Call a method of a rank with a record. Does not block; raises WireError when `argument` cannot be encoded.

        `read` decodes the Future's result, on the I/O thread, and raises nothing but WireError. The Future raises
        RemoteError (the handler raised), CallTimeout (no reply for `timeout_s` seconds since the call and since the
        rank's last reply to the same method), RoleDied (the rank was lost or is not there) or what `fail_role` was
        given. It cannot be cancelled.
        """
        parts = to_parts(encode(argument))
        with self._lock:
            self._raise_if_closed(role)
            peer = self._by_name.get((role, rank))
            failure = self._broken.get(role) or self._absence(role, rank, peer)
            if failure is None and peer is not None:
                call = self.pending.add(peer, method, timeout_s, read, self.clock.now())
                self._said.append(Said(time.time(), peer, f"call {method}"))
                self._outbox.put((call, parts))
                self._wake()
                return call.future
        return failed(failure)

    def fail_role(self, role: str, error: Exception) -> None:
        """Break a role: its pending calls, all later ones and `wait_for` raise `error` (the first one given)."""
        with self._lock:
            error = self._broken.setdefault(role, error)
            calls = self.pending.take(lambda call: call.peer.role == role)
            self._lock.notify_all()
        for call in calls:
            call.future.set_exception(error)

    def starts(self, role: str) -> int:
        """Return how often `role` was dismissed: the number of its present start."""
        with self._lock:
            return self._starts.get(role, 0)

    def revive(self, role: str) -> None:
        """Undo `fail_role`: the ranks of `role` can be called again."""
        with self._lock:
            self._broken.pop(role, None)

    def dismiss(self, role: str, reason: str) -> None:
        """Give up all ranks of `role` because it is started again.

        Whoever says hello with another number than `starts` is refused, and old ranks that still send are asked to end.
        """
        with self._lock:
            self._broken.pop(role, None)
            dismissed = self._of_role(role)
            for peer in dismissed:
                peer.lost = peer.lost or reason
                del self._by_name[role, peer.rank]
            calls = self.pending.take(lambda call: call.peer.role == role)
            number = self._starts[role] = self._starts.get(role, 0) + 1
        for call in calls:
            call.future.set_exception(RoleDied(f"{call.peer} is lost: {reason}"))
        log.info("%s: %d ranks are given up, start %d follows", role, len(dismissed), number)

    def _of_role(self, role: str) -> list[Peer]:
        return sorted((peer for peer in self._by_name.values() if peer.role == role), key=lambda peer: peer.rank)

    def _raise_if_closed(self, role: str) -> None:
        if self.closed:
            raise RunError(f"the control server is closed; {role} cannot be reached")

    def _absence(self, role: str, rank: int, peer: Peer | None) -> Exception | None:
        """Say why a rank cannot be called; None: it can."""
        if peer is None:
            ranks = shortened([str(other.rank) for other in self._of_role(role)], 8)
            return RoleDied(f"{role} rank {rank} is not connected; connected ranks of {role}: {ranks or 'none'}")
        return RoleDied(f"{peer} is lost: {peer.lost}", hang=peer.silent) if peer.lost else None


def failed(error: BaseException | None) -> Future[Any]:
    """Return a call that has failed before it was sent."""
    refused: Future[Any] = Future()
    refused.set_exception(error)
    return refused


C = TypeVar("C")
A = TypeVar("A")
As = TypeVarTuple("As")
R = TypeVar("R")


@dataclass(eq=False)
class RoleHandle(Generic[C]):
    """Calls the ranks of one role; `C` is the class that declares the role's calls, such as `ActorCalls`.

    `handle.call(0, ActorCalls.logprobs, batch).result()`: the argument's and the result's types are those of the
    declaration, and so is the deadline. Ranks may still be starting when it is made (`ControlServer.wait_for`).
    """

    server: ControlServer
    role: str
    world: int  # ranks of the role
    timeout: Timeout
    find_layout: Callable[[], Layout] = lambda: ROWS  # tells how its model reads micro-batches, when one is cut
    retired: Exception | None = field(default=None, init=False)
    """Exception that every later call raises; None while the handle is in use."""
    watchers: list[Callable[[int, str], Callable[[], None]]] = field(default_factory=list, init=False)
    """Functions (rank, name of a call) -> function to call when its answer is there; called for each call."""

    def __post_init__(self) -> None:
        self.ready = list(range(self.world))
        """Numbers that can be called; for engines, the code that starts them keeps this list up to date."""

    @property
    def layout(self) -> Layout:
        """Tell how the model of the role reads micro-batches. Raises ModelError."""
        return self.find_layout()

    @overload
    def call(self, rank: int, method: Callable[[C], R], /) -> Future[R]: ...
    @overload
    def call(self, rank: int, method: Callable[[C, A], Future[R]], argument: A, /) -> Future[R]: ...
    @overload
    def call(self, rank: int, method: Callable[[C, A], R], argument: A, /) -> Future[R]: ...

    def call(self, rank: int, method: Any, argument: Any = None, /) -> Future[Any]:
        """Call a method on one rank; the Future raises as that of `ControlServer.call`.

        Raises WireError for an argument that cannot travel.
        """
        spec = spec_of(method)
        future = self._send(self.rank_of(rank), spec, argument)
        for watch in self.watchers:
            ended = watch(self.rank_of(rank), spec.name)
            future.add_done_callback(lambda _, ended=ended: ended())  # type: ignore[misc]
        return future

    def start_all(self, method: Callable[[C, *As], R], /, *argument: *As) -> list[Future[R]]:
        """Call a method on all ranks with the same argument; returns Futures in rank order."""
        call: Any = self.call
        return [call(rank, method, *argument) for rank in range(self.world)]

    def start_each(self, method: Callable[[C, A], R], arguments: Sequence[A], /) -> list[Future[R]]:
        """Call a method on all ranks, each with its own argument; returns Futures in rank order."""
        return [self.call(rank, method, argument) for rank, argument in zip(range(self.world), arguments, strict=True)]

    def call_all(self, method: Callable[[C, *As], R], /, *argument: *As) -> list[R]:
        """Call a method on all ranks and wait for the results, in rank order, or for the first failure.

        After one rank has failed the others may hang in a collective until their deadline: their calls are not
        waited for, and end by themselves.
        """
        return gather(self.start_all(method, *argument))

    def phases(self) -> dict[int, str]:
        """Return what each rank is doing, as of its last heartbeat: rank -> phase."""
        return {peer.rank: peer.phase for peer in self.server.peers(self.role)}

    def names(self, rank: int) -> str:
        """Name a rank, with its node and process id."""
        found = [str(peer) for peer in self.server.peers(self.role) if peer.rank == rank]
        return found[0] if found else f"{self.role} rank {rank}"

    def ask(self, rank: int, method: Callable[[Any], R]) -> Future[R]:
        """Call a method of one process of the role, also of an engine's follower; `watchers` are not called."""
        return self._send(rank, spec_of(method))

    def _send(self, rank: int, spec: CallSpec, argument: Any = None) -> Future[Any]:
        if self.retired is not None:
            return failed(self.retired)
        return self.server.call(self.role, rank, spec.name, argument, spec.seconds(self.timeout), spec.read_result)

    def rank_of(self, number: int) -> int:
        """Return the rank that takes the calls to `number`."""
        return number


class EngineHandle(RoleHandle[EngineCalls]):
    """Calls the engines of a role, each by its number, through its first rank.

    `world` is the number of engines.
    """

    def __init__(self, server: ControlServer, role: str, ranks: int, width: int, timeout: Timeout) -> None:
        """`ranks`: the role's; `width`: those of one engine."""
        super().__init__(server, role, ranks // width, timeout)
        self.width = width
        self.goes_on_without: Callable[[int, BaseException], bool] = lambda engine, error: False
        """Returns whether the run goes on without an engine whose call has failed; `groups.engines` decides."""
        self.give_up: Callable[[int, str], bool] = lambda engine, why: False
        """Gives an engine up, and says why; False: the run cannot do without it."""

    def rank_of(self, number: int) -> int:
        return number * self.width


def send_shards(
    role: RoleHandle[C],
    method: Callable[[C, A], R],
    request: Callable[[Experience, list[list[int]]], A],
    whole: Experience,
    max_tokens: int,
) -> tuple[list[Shard], list[Future[R]]]:
    """Send every rank its part of a batch, cut by `shards` and packed by `request`; return parts and calls in order."""
    parts = shards(whole, role.world, max_tokens, role.layout)
    return parts, role.start_each(method, [request(part.experience, part.micro) for part in parts])


def gather(futures: Sequence[Future[R]]) -> list[R]:
    """Wait for results, in order. Raises as soon as one failed; of several failures a user's error comes first."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failures = [error for future in futures if future in done and (error := future.exception()) is not None]
    if failures:
        raise min(failures, key=lambda error: not (isinstance(error, RemoteError) and error.user_error))
    return [future.result() for future in futures]

"""The I/O thread of the conductor: it sends and receives all messages, keeps heartbeats and deadlines."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import zmq

from slurm_rlhf.errors import CallTimeout, RoleDied, RunError, WireError, of_hang
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import Authenticator, RunKeys
from slurm_rlhf.wire.codec import Buffer, decode
from slurm_rlhf.wire.io_thread import IoThread, Part, make_socket
from slurm_rlhf.wire.messages import (
    LOOKING,
    MAIN_LANE,
    NUMBERED,
    PULSE_LANE,
    Call,
    CallFailure,
    Envelope,
    Hello,
    Kind,
    Peer,
    PendingCalls,
    Said,
    unpack,
)

log = logging.getLogger(__name__)

_REMEMBERED = 400  # messages


class IoLoop(IoThread):
    """Runs the I/O thread. It shares the peers and `pending` with other threads, under `_lock`, and nothing else."""

    name = "control server"

    def __init__(
        self,
        keys: RunKeys,
        *,
        host: str = "127.0.0.1",
        heartbeat_interval: float = 1.0,
        heartbeat_limit: float = 20.0,
        on_lost: Callable[[Peer], None] | None = None,
        on_event: Callable[[Peer, str, dict[str, Any]], None] | None = None,
    ) -> None:
        """Listen at once, on a port that the system chooses.

        host: address to listen on.
        on_lost: a rank fell silent for `heartbeat_limit` seconds or lost messages (`peer.lost` says which). Its calls
            have failed with RoleDied by then. Not called for a rank that said goodbye.
        on_event: what a rank sent with `ControlClient.event`.
        Raises RunError when the address cannot be bound.
        """
        super().__init__(heartbeat_interval, heartbeat_limit)
        self._host = host
        self._broken: dict[str, Exception] = {}  # role -> what its calls raise
        self._by_route: dict[bytes, Peer] = {}  # routing id of a connection -> the peer behind it, lost ones included
        self._by_name: dict[tuple[str, int], Peer] = {}  # (role, rank) -> the newest peer of that name, lost or not
        self.pending = PendingCalls()
        self.replayed = 0  # dropped messages that had come before, and hellos of a rank that is already here
        self.late = 0  # dropped replies, to calls that had been given up
        self._starts: dict[str, int] = {}  # role -> number of its start whose ranks are admitted; 0 where it is missing
        self._said: deque[Said] = deque(maxlen=_REMEMBERED)
        self._moves = 0  # count of events, and of answers to calls that are not in LOOKING
        self._lock = threading.Condition(threading.Lock())
        self._on_lost = on_lost
        self._on_event = on_event
        self._outbox: SimpleQueue[tuple[Call, list[Part]]] = SimpleQueue()
        self._given_up: SimpleQueue[tuple[Peer, str]] = SimpleQueue()
        self._router = make_socket(self._context, zmq.ROUTER, timeouts.LINGER_MS)
        self._router.router_mandatory = True
        # A rank whose connection broke comes back under its name before the old connection is known to be dead.
        self._router.router_handover = True
        self.auth = Authenticator(self._context, self._router, keys)
        try:
            self._router.bind(f"tcp://{host}:0")
        except zmq.ZMQError as error:
            self.auth.close()
            self._abandon()
            raise RunError(f"the conductor cannot listen on {host!r}: {error}; use an address of this node") from error
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._lock.notify_all()
        super().close()

    def _present(self) -> list[Peer]:
        """Return all peers that are not lost."""
        return [peer for peer in list(self._by_name.values()) if not peer.lost]

    def _sources(self) -> Sequence[zmq.Socket[Any]]:
        return self._router, *self.auth.sockets

    def _round(self) -> None:
        while not self._outbox.empty():  # nobody else takes anything out
            call, parts = self._outbox.get_nowait()
            if not call.peer.lost and not call.future.done():
                self._send(call.peer, "call", parts, call.id, call.method)
        while not self._given_up.empty():
            peer, why = self._given_up.get_nowait()
            if not peer.lost:
                self._drop(peer, why)
        self.auth.answer()
        self._receive(self._router)

    def _finish(self) -> None:
        with self._lock:
            self.closed = True
            calls = self.pending.take(lambda _: True)
            self._lock.notify_all()
        for call in calls:
            call.future.set_exception(RunError(f"the control server was closed before {call.peer} answered"))
        for peer in self._present():
            self._send(peer, "bye")
        self.auth.close()
        self._router.close()

    def _send(self, peer: Peer, kind: Kind, parts: Sequence[Part] = (), call: int = 0, method: str = "") -> None:
        peer.sent += kind in NUMBERED
        message = [peer.route, Envelope(kind, peer.sent, call, method).pack(), *parts]
        # A late heartbeat is useless; other messages are kept until the rank is heard again.
        if (peer.backlog or not self._transmit(message)) and kind != "beat":
            peer.backlog.append(message)

    def _transmit(self, message: list[Part]) -> bool:
        try:
            self._router.send_multipart(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        self.auth.heard(frames[0])
        route = frames[0].bytes
        envelope, rest = unpack([frame.buffer for frame in frames[1:]])
        if envelope.kind == "pulse":
            self._take_pulse(route, envelope.name)
            return
        peer = self._by_route.get(route)
        if envelope.kind == "hello":
            self._welcome(route, decode(rest, Hello, "a hello"))
            return
        if peer is None:
            raise WireError(f"a {envelope.kind} from a process that never said hello")
        if peer.lost:
            self._transmit([route, Envelope("lost", peer.sent).pack()])
            return
        order = envelope.order(peer.received)
        if order == "replayed":
            self.replayed += 1
            return
        peer.heard = self.now
        if order == "gap":
            self._lose(peer, f"messages {peer.received + 1} to {envelope.number} were lost with its connection")
            return
        peer.received = envelope.number
        while peer.backlog and self._transmit(peer.backlog[0]):
            peer.backlog.popleft()
        self._dispatch(peer, envelope, rest)

    def _take_pulse(self, route: bytes, phase: str) -> None:
        peer = self._by_route.get(MAIN_LANE + route[1:])
        if route[:1] != PULSE_LANE or peer is None:
            raise WireError("a pulse from a process that never said hello")
        if not peer.lost:
            peer.phase = phase
            peer.heard = self.now

    def _dispatch(self, peer: Peer, envelope: Envelope, rest: Sequence[Buffer]) -> None:
        match envelope.kind:
            case "beat":
                pass
            case "reply" | "error":
                self._resolve(peer, envelope, rest)
            case "event":
                data = decode(rest, dict[str, Any], f"an event of {peer}")
                self._heard_of(peer, f"event {envelope.name}")
                self._call_back(self._on_event, peer, envelope.name, data)
            case "bye":
                self._drop(peer, "it said goodbye")
            case _:
                raise WireError(f"a {envelope.kind} from {peer}; only the conductor sends that")

    def _welcome(self, route: bytes, hello: Hello) -> None:
        newcomer = hello.peer(route, self.now)
        known, wanted = self._by_route.get(route), self._starts.get(newcomer.role, 0)
        holder = self._by_name.get((newcomer.role, newcomer.rank))
        if known is not None and (known is not holder or known.lost):
            raise WireError(f"{known} said hello again as {newcomer}")
        if known is None:
            taken = f"start {wanted} of {newcomer.role}" if hello.start != wanted else ""
            if taken or (holder is not None and not holder.lost):
                self.replayed += 1
                self._transmit([route, Envelope("taken", 0, name=taken or str(holder)).pack()])
                return
            with self._lock:
                self._by_route[route] = self._by_name[newcomer.role, newcomer.rank] = newcomer
                self._lock.notify_all()
            known = newcomer
        self._send(known, "welcome")

    def _resolve(self, peer: Peer, envelope: Envelope, rest: Sequence[Buffer]) -> None:
        with self._lock:
            call = self.pending.answered(envelope.call, peer, self.now)
        if call is None:
            if not 0 < envelope.call <= self.pending.newest:
                raise WireError(f"{peer} replied to call {envelope.call}, which nobody made")
            self.late += 1
            return
        self._heard_of(peer, f"{envelope.kind} to {call.method}", looks=call.method in LOOKING)
        try:
            if envelope.kind == "error":
                failure: CallFailure = decode(rest, CallFailure, "its error")
                call.future.set_exception(failure.raised(peer, call.method))
            else:
                call.future.set_result(call.read(rest))
        except WireError as error:
            call.future.set_exception(WireError(f"the reply of {peer} to {call.method} is broken: {error}"))
            raise

    def _heard_of(self, peer: Peer, what: str, looks: bool = False) -> None:
        self._said.append(Said(time.time(), peer, what))
        self._moves += not looks

    def _beat(self) -> None:
        for peer in self._present():
            if self.now - peer.heard > self._limit:
                peer.silent = True
                self._lose(peer, f"it was not heard from for {self._limit:g} s, last phase {peer.phase!r}")
            else:
                self._send(peer, "beat")
                self._transmit([PULSE_LANE + peer.route[1:], Envelope("pulse", 0).pack()])
        with self._lock:
            calls = self.pending.expired(self.now)
        for call in calls:
            peer = call.peer
            call.future.set_exception(
                CallTimeout(
                    f"{peer} did not answer {call.method} within {call.timeout_s:g} s; it was last heard "
                    f"{self.now - peer.heard:.1f} s ago, in phase {peer.phase!r}. Its log says where it stands; if "
                    "the work takes longer than that, raise the limit in [timeout]"
                )
            )

    def _lose(self, peer: Peer, reason: str) -> None:
        self._drop(peer, reason)
        log.warning("%s is lost: %s", peer, peer.lost, extra=of_hang(peer.silent))
        self._call_back(self._on_lost, peer)

    def _drop(self, peer: Peer, reason: str) -> None:
        with self._lock:
            peer.lost = reason
            peer.backlog.clear()
            calls = self.pending.take(lambda call: call.peer is peer)
            self._lock.notify_all()
        self._transmit([peer.route, Envelope("lost", peer.sent).pack()])
        for call in calls:
            call.future.set_exception(
                RoleDied(f"{peer} is lost while it was in {call.method}: {reason}", hang=peer.silent)
            )

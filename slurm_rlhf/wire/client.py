"""The end of a rank: it says hello, sends heartbeats, and hands calls to the main thread."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue, SimpleQueue
from typing import Any

import zmq

from slurm_rlhf.errors import CallTimeout, RoleDied, RunError, WireError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.codec import Buffer, encode
from slurm_rlhf.wire.io_thread import IoThread, Part, make_socket, to_parts
from slurm_rlhf.wire.messages import MAIN_LANE, NUMBERED, PULSE_LANE, Envelope, Hello, Kind, Request, unpack

THREAD_FAILED = "the thread that talks to the conductor has failed: the lines above say why"
"""Reason that a rank gives when it leaves although its conductor is still there."""


class ControlClient(IoThread):
    """Receives the conductor's calls for a rank; its I/O thread sends heartbeats while other threads compute.

    Any thread may use it.

    `phase` says in a word what the rank is doing; pulses carry it, and errors of the conductor name it.
    """

    name = "control client"

    def __init__(
        self,
        endpoint: str,
        keys: RunKeys,
        role: str,
        rank: int,
        world: int,
        *,
        host: str | None = None,
        start: int = 0,
        heartbeat_interval: float = 1.0,
        heartbeat_limit: float = 20.0,
        on_conductor_lost: Callable[[str], None] | None = None,
        on_beat: Callable[[], None] | None = None,
        threaded: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        """Start to connect, and return.

        host: this node's name in messages; None: what the node calls itself.
        start: number of the start of the role that this rank belongs to, as given by the conductor.
        on_conductor_lost: called with the reason, on the I/O thread, when the conductor was silent for
            `heartbeat_limit` seconds, said goodbye or gave this rank up. For a rank whose main thread may hang.
        on_beat: called on the I/O thread with each heartbeat; it returns at once.
        threaded: calls without argument that never reach `receive`: a thread of their own answers each.
        Raises RunError for an invalid endpoint.
        """
        super().__init__(heartbeat_interval, heartbeat_limit)
        self.phase = "start"
        self.endpoint = endpoint
        self._me = f"{role} rank {rank}"
        self._hello = to_parts(encode(Hello(role, rank, world, host or socket.gethostname(), os.getpid(), start)))
        self._heard = self.now
        self._on_conductor_lost = on_conductor_lost
        self._on_beat = on_beat
        self._threaded = threaded or {}
        self._inbox: Queue[Request | None] = Queue()
        self._outbox: SimpleQueue[tuple[Kind, list[Part], int, str]] = SimpleQueue()
        self._sent = self._received = 0
        self._welcomed = threading.Event()
        self._obstacle = "nobody answered there, or the run's key is another one"
        self.conductor_lost = ""
        """Reason for which the conductor counts as gone; empty while it is there. Once lost, it stays lost."""
        token = os.urandom(16)
        self._dealer = self._connected_socket(keys, MAIN_LANE + token)
        self._pulse = self._connected_socket(keys, PULSE_LANE + token)
        self._thread.start()

    def connect(self, timeout_s: float) -> None:
        """Wait until the conductor has welcomed this rank. Raises CallTimeout, or RoleDied when it is lost."""
        welcomed = self._welcomed.wait(timeout_s)
        self._raise_if_lost()
        if not welcomed:
            raise CallTimeout(
                f"{self._me}: the conductor at {self.endpoint} gave no welcome in {timeout_s:g} s: {self._obstacle}"
            )

    def receive(self, timeout_s: float | None = None) -> Request | None:
        """Take the next call; None when there is none for `timeout_s` seconds (0: only look; None: wait without end).

        Raises RoleDied when the conductor is lost and all calls that had arrived are taken.
        """
        try:
            request = self._inbox.get(timeout_s != 0, timeout_s)
        except Empty:
            return None
        if request is None:
            self._inbox.put(None)
            self._raise_if_lost()
            raise RunError(f"{self._me}: its control client is closed")
        return request

    def waits(self, method: str) -> bool:
        """Tell whether a call of `method` has arrived that nobody has taken yet."""
        with self._inbox.mutex:
            return any(request is not None and request.method == method for request in self._inbox.queue)

    def event(self, name: str, /, **data: Any) -> None:
        """Tell the conductor something unasked. Does not block; raises WireError as `Request.reply` does."""
        self._post("event", encode(data), 0, name)

    def _connected_socket(self, keys: RunKeys, routing_id: bytes) -> zmq.Socket[Any]:
        dealer = make_socket(self._context, zmq.DEALER, timeouts.LINGER_MS)
        dealer.routing_id = routing_id
        dealer.curve_serverkey = keys.server_public.encode()
        dealer.curve_publickey = keys.client_public.encode()
        dealer.curve_secretkey = keys.client_secret.encode()
        try:
            dealer.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._abandon()
            raise RunError(f"{self._me}: {self.endpoint!r} is no endpoint of a conductor: {error}") from error
        return dealer

    def _raise_if_lost(self) -> None:
        if self.conductor_lost:
            raise RoleDied(f"{self._me}: the conductor at {self.endpoint} is lost: {self.conductor_lost}")

    def _post(self, kind: Kind, frames: list[Buffer], call: int, name: str = "") -> None:
        self._outbox.put((kind, to_parts(frames), call, name))
        self._wake()

    def _sources(self) -> Sequence[zmq.Socket[Any]]:
        return self._dealer, self._pulse

    def _round(self) -> None:
        self._receive(self._pulse)
        self._receive(self._dealer)
        self._send_queued()

    def _failed(self) -> None:
        self._lose(THREAD_FAILED)  # else this rank, which sends no heartbeats now, would seem to hang

    def _finish(self) -> None:
        self._send_queued()
        if self._welcomed.is_set() and not self.conductor_lost:
            self._send("bye")
        self._inbox.put(None)
        self._pulse.close(linger=0)
        self._dealer.close(linger=0 if self.conductor_lost else timeouts.LINGER_MS)

    def _send_queued(self) -> None:
        """Send what is queued, after the welcome: a conductor that does not know this rank would drop it."""
        with suppress(Empty):
            while self._welcomed.is_set():
                self._send(*self._outbox.get_nowait())

    def _send(self, kind: Kind, parts: Sequence[Part] = (), call: int = 0, name: str = "") -> None:
        self._sent += kind in NUMBERED
        self._dealer.send_multipart([Envelope(kind, self._sent, call, name).pack(), *parts], zmq.NOBLOCK)

    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        envelope, rest = unpack([frame.buffer for frame in frames])
        self._heard = self.now
        if envelope.kind == "pulse":
            return
        if envelope.kind == "taken":
            self._obstacle = f"{envelope.name} has this rank"
            return
        if envelope.kind == "lost":
            self._lose("it gave this rank up")
            return
        order = envelope.order(self._received)
        if order == "replayed":
            raise WireError(f"a {envelope.kind} came twice")
        if order == "gap":
            self._lose(f"messages {self._received + 1} to {envelope.number} of it were lost with the connection")
            return
        self._received = envelope.number
        match envelope.kind:
            case "welcome":
                self._welcomed.set()
            case "call":
                self._accept(Request(envelope.name, rest, envelope.call, self._post))
            case "bye":
                self._lose("it said goodbye")

    def _accept(self, request: Request) -> None:
        if request.method in self._threaded:
            request.answer_apart(self._threaded[request.method])
        else:
            self._inbox.put(request)

    def _beat(self) -> None:
        if self._on_beat is not None:
            self._on_beat()
        if self.now - self._heard > self._limit:
            self._lose(f"it was not heard from for {self._limit:g} s")
        elif self._welcomed.is_set():
            self._send("beat")
            self._pulse.send(Envelope("pulse", 0, name=self.phase).pack(), zmq.NOBLOCK)
        else:
            self._send("hello", self._hello)

    def _lose(self, reason: str) -> None:
        if self.conductor_lost:
            return
        self.conductor_lost = reason
        self.closed = True
        self._welcomed.set()
        self._inbox.put(None)
        self._call_back(self._on_conductor_lost, reason)

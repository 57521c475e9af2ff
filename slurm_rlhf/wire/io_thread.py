"""The I/O thread of both ends: its loop, sockets, wake-up, heartbeat and clock."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import zmq

from slurm_rlhf.errors import WireError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.codec import MAX_FRAME_BYTES, Buffer

Part = bytes | zmq.Frame


log = logging.getLogger(__name__)

_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000
_ROUNDS_PER_LIMIT = 4
# Most messages received in a row before timers and queued messages get their turn: no peer can occupy the thread.
_MESSAGES_PER_ROUND = 200


def make_socket(context: zmq.Context[Any], kind: int, linger_ms: int) -> zmq.Socket[Any]:
    """Open a socket that limits only the size of a frame; callers limit the messages in flight.

    linger_ms: how long unsent messages are kept once the socket, or one of its connections, is closed. It is set first
        of all, because a connection keeps the value of the moment it breaks; ZeroMQ's default is without end.
    """
    socket = context.socket(kind)
    socket.linger = linger_ms
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.handshake_ivl = timeouts.CONNECT_HANDSHAKE_MS
    socket.reconnect_ivl = _RECONNECT_MS
    socket.reconnect_ivl_max = _RECONNECT_MAX_MS
    socket.tcp_keepalive = 1
    return socket


def end_context(context: zmq.Context[Any], patience_s: float = timeouts.CONTEXT_END_S) -> None:
    """End `context`, whose sockets are closed, or leave it to itself after `patience_s` seconds."""
    ending = threading.Thread(target=context.term, name="control-end", daemon=True)
    ending.start()
    ending.join(patience_s)
    if ending.is_alive():
        log.warning("ZeroMQ did not close its connections in %g s: they are left open", patience_s)


def to_parts(frames: list[Buffer]) -> list[Part]:
    """Copy frames, so that the arrays which they came from may change as soon as this returns.

    One copy, in the thread that makes the message. pyzmq could send the arrays' own memory, but then it frees that
    memory at the interpreter's exit while ZeroMQ still reads it, and processes crash while they end.
    """
    return [frame if isinstance(frame, bytes) else zmq.Frame(frame, copy=True) for frame in frames]


class ListeningClock:
    """Counts the seconds in which the I/O thread was able to receive; it stops while the thread was not.

    A process that was suspended (`scontrol suspend`), or whose interpreter lock was held, received nothing during that
    time. It must count neither as silence of the others nor against the deadlines of calls to them.

    The I/O thread judges silence and deadlines by the result of its last `tick`, never by `now`: a suspension in the
    middle of a round is only known at the next tick.
    """

    def __init__(self, longest_round: float) -> None:
        """`longest_round`: seconds of a round of the I/O loop that count; time beyond them does not."""
        self._longest_round = longest_round
        self._missed = 0.0
        self._last = time.monotonic()
        self._absence = (0.0, -math.inf)  # (seconds, when it ended), by the clock of this machine

    def now(self) -> float:
        """Return seconds since some fixed moment, for other threads."""
        return time.monotonic() - self._missed

    def tick(self) -> float:
        """I/O thread, once per round, after waiting and before reading: return the time of that round."""
        real = time.monotonic()
        if real - self._last > self._longest_round:
            self._missed += real - self._last - self._longest_round
            self._absence = (real - self._last, real)
        self._last = real
        return real - self._missed

    def absence_s(self, within_s: float) -> float:
        """Return the length of an absence that goes on, or ended within the last `within_s` seconds; 0.0: none.

        An absence is a time in which the I/O thread could not receive. For other threads, which may run again before
        the I/O thread does: an absence counts even if that thread has not noticed it yet.
        """
        real = time.monotonic()
        lasting = real - self._last
        seconds, ended = self._absence
        if lasting > self._longest_round:
            return lasting
        return seconds if real - ended < within_s else 0.0


class IoThread(ABC):
    """Runs a loop that polls, sends and receives in a thread of its own, which alone uses the sockets."""

    name: str  # name of this end in its log

    def __init__(self, heartbeat_interval: float, heartbeat_limit: float) -> None:
        """`heartbeat_limit`: seconds of silence after which the other side is lost."""
        self.garbage = 0
        """Messages that were dropped, because they did not decode or came from no known rank."""
        self.closed = False
        self._interval = heartbeat_interval
        self._limit = heartbeat_limit
        self._next_beat = 0.0
        # In a round that takes longer than this the thread was held up, and could not receive.
        self.clock = ListeningClock(heartbeat_limit / _ROUNDS_PER_LIMIT)
        self.now = self.clock.now()
        """Time at which the thread last listened."""
        self._context: zmq.Context[Any] = zmq.Context()
        # The poll also waits for this descriptor; it lives as long as somebody can wake the thread.
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup).atexit = False
        self._thread = threading.Thread(target=self._run, name=self.name.replace(" ", "-"), daemon=True)

    def close(self) -> None:
        """Send what is queued, say goodbye, and return once the sockets are closed. May be called twice."""
        self.closed = True
        self._wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        """Let the I/O thread's poll return. Any thread: only its own may touch the sockets."""
        os.eventfd_write(self._wakeup, 1)

    def _abandon(self) -> None:
        """Close what was opened: the thread will not be started."""
        self._context.destroy(linger=0)

    def _run(self) -> None:
        """Run the thread; every method below runs on it."""
        poller = zmq.Poller()
        for source in (self._wakeup, *self._sources()):
            poller.register(source, zmq.POLLIN)
        try:
            while not self.closed:
                poller.poll(max(0, int((self._next_beat - self.clock.now()) * 1000) + 1))
                self.now = self.clock.tick()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
                self._round()
                if self.now >= self._next_beat:
                    self._next_beat = self.now + self._interval
                    self._beat()
        except Exception:
            try:
                log.exception("the %s's thread failed", self.name)
            finally:  # logging fails if there is no memory
                self._failed()
        finally:
            self._finish()
            end_context(self._context)

    def _receive(self, socket: zmq.Socket[Any]) -> None:
        """Take the messages that have come, the rest of a flood in the next round."""
        for _ in range(_MESSAGES_PER_ROUND):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._handle(frames)
            except WireError as error:
                self.garbage += 1
                if self.garbage & (self.garbage - 1) == 0:
                    log.warning("dropped a message: %s; %d so far", error, self.garbage)

    def _call_back(self, callback: Callable[..., None] | None, *args: Any) -> None:
        """Call a callback, if there is one; log its exceptions, which would end this thread and all communication."""
        try:
            if callback is not None:
                callback(*args)
        except Exception:
            log.exception("a callback of the %s failed", self.name)

    def _failed(self) -> None:
        """Note that the thread ends because it has failed."""

    @abstractmethod
    def _sources(self) -> Sequence[zmq.Socket[Any]]:
        """Return the sockets that are polled."""

    @abstractmethod
    def _round(self) -> None:
        """Receive and send what there is."""

    @abstractmethod
    def _beat(self) -> None:
        """Send heartbeats, and find peers that were silent for too long."""

    @abstractmethod
    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        """Take a message. Raises WireError for one that is to be dropped."""

    @abstractmethod
    def _finish(self) -> None:
        """Say goodbye and close the sockets."""

"""The links between the leader of an engine and its followers: Unix sockets, the commands, and the answers to them.

All of them are processes of one user on one node. No other user can open the sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from msgspec import msgpack

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.tp_engine import EnginePlace
from slurm_rlhf.errors import CallTimeout, EngineBroken, RoleDied, RunError
from slurm_rlhf.records import SyncConnection, SyncReport
from slurm_rlhf.wire.calls import SyncGroupRequest, WakeUpRequest
from slurm_rlhf.wire.codec import call, decode, encode, read, spec_of


class LocalListener:
    """Listens in a directory of its own, which only this user can enter."""

    def __init__(self, backlog: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="listen-")
        self.path = os.path.join(self._directory.name, "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(backlog)

    def accept_all(self, place: EnginePlace, timeout_s: float) -> dict[int, LocalStream]:
        """Accept all followers, by TP rank, and close; each sends its number first.

        Raises CallTimeout naming who is missing.
        """
        end = time.monotonic() + timeout_s
        streams: dict[int, LocalStream] = {}
        with contextlib.closing(self):
            while missing := place.followers - set(streams):
                self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                try:
                    accepted, _ = self._socket.accept()
                except TimeoutError:
                    raise CallTimeout(
                        f"{place} is not complete: TP rank {sorted(missing)} did not connect within {timeout_s:g} s "
                        "(timeout.connect); see their logs"
                    ) from None
                accepted.setblocking(True)
                stream = LocalStream(Connection(accepted.detach()))
                streams[stream.receive()] = stream
        return streams

    def close(self) -> None:
        """Stop listening and leave nothing on the disk; connections stay."""
        self._socket.close()
        self._directory.cleanup()


class LocalStream:
    """Sends and receives what `codec` carries; notices at once if the process at the other end is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, value: Any) -> None:
        """Send a message, from any thread; block while the peer does not read. Raises RoleDied if it is gone."""
        with self._sending, _gone():
            self._connection.send_bytes(msgpack.encode(encode(value)))

    def receive(self) -> Any:
        """Wait for the next message; not after `listen`. Raises RoleDied, WireError."""
        with _gone():
            frames = msgpack.decode(self._connection.recv_bytes(), type=list[bytes])
        return decode(frames)

    def listen(self, on_message: Callable[[Any], None], on_end: Callable[[Exception], None]) -> None:
        """Start a thread that hands every message to `on_message`, and in the end the reason to `on_end`."""

        def read() -> None:
            try:
                while True:
                    on_message(self.receive())
            except Exception as error:
                on_end(error)

        threading.Thread(target=read, name="local-stream", daemon=True).start()


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise RoleDied(f"the process is gone: {str(error) or 'it closed its end'}") from error


A = TypeVar("A")
R = TypeVar("R")


class FollowerCalls(Protocol):
    """Declares the commands of a leader, which a follower carries out in their order."""

    @call(deadline="start")
    def start(self) -> None:
        """Start the engine's part of this rank."""

    @call(deadline=None)
    def add(self, request: GenerateRequest) -> None:
        """Queue a request."""

    @call(deadline=None)
    def step(self) -> None:
        """Sample the next tokens."""

    @call(deadline=None)
    def drop(self) -> None:
        """Drop all requests."""

    @call(deadline="collective")
    def check(self) -> bytes:
        """Return the digest of what this rank has done so far, see `engine.tp_engine.TpDigest`."""

    @call(deadline="sync")
    def sync_join(self, request: SyncGroupRequest) -> SyncConnection:
        """Join a weight transfer group; `request.rank` is the leader's, those of the followers come after it."""

    @call(deadline="sync")
    def sync_receive(self, version: int) -> SyncReport:
        """Receive the weights of policy `version`."""

    @call(deadline="sync")
    def sleep(self) -> None:
        """Drop all requests and give up the engine's memory."""

    @call(deadline="sync")
    def wake_up(self, request: WakeUpRequest) -> None:
        """Take back a part of the engine's memory."""

    @call(deadline=None)
    def leave(self) -> None:
        """Close the engine and end."""


class LeaderMessage(NamedTuple):
    """Carries a command from the leader to a follower."""

    number: int  # 1, 2, 3, ...
    name: str  # a method of FollowerCalls
    argument: Any  # a record; arrives as the map of its fields

    @property
    def leaving(self) -> bool:
        """Say whether nothing comes after this."""
        return self.name == FollowerCalls.leave.__name__


class FollowerAnswer(NamedTuple):
    """Carries a message of a follower: a `LeaderMessage` is done, or it will run a batch."""

    word: Literal["done", "failed", "planned"]
    number: int  # number of the `LeaderMessage`, or of the batch
    content: Any  # the result, what went wrong, or the digest


class FollowerLinks:
    """Sends commands to the followers of an engine and hears their answers.

    Once a follower has failed, methods raise EngineBroken, and `on_failure` gets the reason. Each stream has a thread
    that reads it: so a follower that dies, or is about to run another batch, is noticed even while the main thread is
    inside a collective that this follower will never join and that has no time-out.
    """

    def __init__(
        self, place: EnginePlace, streams: dict[int, LocalStream], timeout: Timeout, on_failure: Callable[[str], None]
    ) -> None:
        """`streams`: by TP rank. `on_failure` is called once, on any thread, with what to say; it must not block."""
        self._place = place
        self._streams = streams
        self._timeout = timeout
        self._on_failure = on_failure
        self._inbox: dict[int, SimpleQueue[FollowerAnswer]] = {rank: SimpleQueue() for rank in streams}
        self._digests: dict[int, dict[int, bytes]] = {}  # batch -> digests by TP rank, until all ranks have sent theirs
        self._lock = threading.Lock()
        self._failure = ""
        self._last_words: dict[int, str] = {}  # rank -> its last error
        self._sent = 0
        self._leaving = False
        for rank, stream in streams.items():
            stream.listen(partial(self._hear, rank), partial(self._lost, rank))

    @overload
    def send(self, method: Callable[[FollowerCalls], object], /) -> None: ...
    @overload
    def send(self, method: Callable[[FollowerCalls, A], object], argument: A, /) -> None: ...

    def send(self, method: Any, argument: Any = None, /) -> None:
        """Send a command to all followers, after all earlier ones. Does not wait for it. Raises RunError."""
        self._check()
        self._sent += 1
        message = LeaderMessage(self._sent, method.__name__, argument)
        self._leaving = self._leaving or message.leaving
        for rank, stream in self._streams.items():
            try:
                stream.send(message)
            except RunError as error:
                self._lost(rank, error)
                self._check()

    def planned(self, batch: int, digest: bytes) -> None:
        """Compare what this rank is about to run with the others, without waiting; a difference stops the engine."""
        self._compare(0, batch, digest)
        self._check()

    def agree(self, digest: bytes, batch: int) -> None:
        """Wait until all ranks have this digest after everything sent. If one has not, stop the engine and raise."""
        self.send(FollowerCalls.check)
        for rank in self._streams:
            if self._answer(rank, FollowerCalls.check) != digest:
                self._fail(diverged(self._place, rank, batch))
        self._check()

    def finish(self, method: Callable[..., R]) -> list[R]:
        """Wait for each follower's answer to the last command, which was `method`. Raises CallTimeout, RunError."""
        return [self._answer(rank, method) for rank in self._streams]

    def _answer(self, rank: int, method: Callable[..., R]) -> R:
        who = f"{self._place}: its rank {self._place.rank(rank)}"
        spec = spec_of(method)
        limit = spec.seconds(self._timeout)
        while True:
            try:
                answer = self._inbox[rank].get(timeout=limit)
            except Empty:
                raise CallTimeout(f"{who} did not follow within {limit:g} s") from None
            self._check()
            if answer.number == self._sent:
                break
        if answer.word == "failed":
            raise RunError(f"{who} failed: {answer.content}")
        result: R = read(spec.result, answer.content, f"the result of {spec.name}")
        return result

    def _hear(self, rank: int, message: Any) -> None:
        answer: FollowerAnswer = read(FollowerAnswer, message, "the answer of a follower")
        if answer.word == "planned":
            self._compare(rank, answer.number, answer.content)
            return
        if answer.word == "failed":
            self._last_words[rank] = answer.content
        self._inbox[rank].put(answer)

    def _compare(self, rank: int, batch: int, digest: bytes) -> None:
        """Note a digest, and fail if it differs from the leader's, which may come before it or after it."""
        with self._lock:
            known = self._digests.setdefault(batch, {})
            known[rank] = digest
            others = [other for other in known if known[other] != known.get(0, known[other])]
            if len(known) > len(self._streams):
                del self._digests[batch]
        for other in others:
            self._fail(diverged(self._place, other, batch))

    def _lost(self, rank: int, error: Exception) -> None:
        if not self._leaving:
            why = self._last_words.get(rank, error)
            self._fail(f"{self._place} is broken: its rank {self._place.rank(rank)} died: {why}; its log says more")

    def _fail(self, reason: str) -> None:
        with self._lock:
            first, self._failure = not self._failure, self._failure or reason
        for inbox in self._inbox.values():
            inbox.put(FollowerAnswer("failed", self._sent, reason))
        if first:
            self._on_failure(reason)

    def _check(self) -> None:
        if self._failure:
            raise EngineBroken(self._failure)


def diverged(place: EnginePlace, tp_rank: int, batch: int) -> str:
    """Write the message for two TP ranks that have done different things."""
    return (
        f"{place} was stopped: rollout ranks {place.rank(0)} and {place.rank(tp_rank)} (TP ranks 0 and {tp_rank}) did "
        f"not do the same up to batch {batch}: other requests, another order or other tokens. What it was sampling was "
        "dropped. All ranks of an engine must run the same software on the same kind of device; if they do, this is a "
        "bug to report"
    )

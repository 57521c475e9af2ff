"""What the leader of an engine tells its followers, and the links over which it does and hears their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.tp_engine import EnginePlace
from slurm_rlhf.errors import CallTimeout, EngineBroken, RunError
from slurm_rlhf.ranks.local_stream import LocalStream
from slurm_rlhf.records import SyncConnection, SyncReport
from slurm_rlhf.wire.calls import SyncGroupRequest, SyncUpdateRequest, WakeUpRequest
from slurm_rlhf.wire.codec import read
from slurm_rlhf.wire.declarations import call, spec_of

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
        """Return the digest of what this rank has done so far, see `rollout.tp_engine.TpDigest`."""

    @call(deadline="sync")
    def sync_join(self, request: SyncGroupRequest) -> SyncConnection:
        """Join a weight transfer group; `request.rank` is the leader's, those of the followers come after it."""

    @call(deadline="sync")
    def sync_receive(self, request: SyncUpdateRequest) -> SyncReport:
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


class EngineCommand(NamedTuple):
    name: str  # a method of FollowerCalls
    argument: Any  # a record; arrives as the map of its fields


class LeaderMessage(NamedTuple):
    """Carries commands from the leader to a follower."""

    number: int  # 1, 2, 3, ...
    commands: list[EngineCommand]

    @property
    def leaving(self) -> bool:
        """Say whether nothing comes after this."""
        return self.commands[-1].name == FollowerCalls.leave.__name__


class FollowerAnswer(NamedTuple):
    """Carries a message of a follower: the last command of a `LeaderMessage` is done, or it will run a batch."""

    word: Literal["done", "failed", "planned"]
    number: int  # number of the `LeaderMessage`, or of the batch
    content: Any  # the result, what went wrong, or the digest


class FollowerLinks:
    """Sends commands to the followers of an engine and hears their answers.

    What it raises says that one of them has failed. Each stream has a thread that reads it. So a
    follower that dies, or is about to run another batch, is noticed even while the main thread is inside a collective
    that this follower will never join and that has no time-out.
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
        self._digests: dict[int, tuple[bytes, int]] = {}  # batch -> digest, ranks that have not confirmed it
        self._early: dict[int, dict[int, bytes]] = {rank: {} for rank in streams}  # batch -> digest, ahead of ours
        self._lock = threading.Lock()
        self._failure = ""
        self._last_words: dict[int, str] = {}  # rank -> its last error
        self._held: list[EngineCommand] = []
        self._sent = 0
        self._leaving = False
        for rank, stream in streams.items():
            stream.listen(partial(self._hear, rank), partial(self._lost, rank))

    def hold(self, method: Callable[[FollowerCalls, A], object], argument: A, /) -> None:
        """Send a command together with the next one that is sent, and before it."""
        self._held.append(EngineCommand(method.__name__, argument))

    @overload
    def send(self, method: Callable[[FollowerCalls], object], /) -> None: ...
    @overload
    def send(self, method: Callable[[FollowerCalls, A], object], argument: A, /) -> None: ...

    def send(self, method: Any, argument: Any = None, /) -> None:
        """Send a command to all followers, after all earlier ones. Does not wait for it. Raises RunError."""
        self._check()
        self._sent += 1
        message = LeaderMessage(self._sent, [*self._held, EngineCommand(method.__name__, argument)])
        self._held = []
        self._leaving = self._leaving or message.leaving
        for rank, stream in self._streams.items():
            try:
                stream.send(message)
            except RunError as error:
                self._lost(rank, error)
                self._check()

    def planned(self, batch: int, digest: bytes) -> None:
        """Compare what this rank is about to run with the others, without waiting; a difference stops the engine."""
        with self._lock:
            early = [(rank, ahead.pop(batch)) for rank, ahead in self._early.items() if batch in ahead]
            if len(early) < len(self._streams):
                self._digests[batch] = (digest, len(self._streams) - len(early))
        for rank, theirs in early:
            if theirs != digest:
                self._fail(diverged(self._place, rank, batch))
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

    def _compare(self, rank: int, batch: int, theirs: bytes) -> None:
        with self._lock:
            if batch not in self._digests:
                self._early[rank][batch] = theirs
                return
            mine, waiting = self._digests.pop(batch)
            if waiting > 1:
                self._digests[batch] = (mine, waiting - 1)
        if theirs != mine:
            self._fail(diverged(self._place, rank, batch))

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

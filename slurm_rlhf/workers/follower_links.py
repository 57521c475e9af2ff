"""The connections of an engine's leader to its followers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from slurm_rlhf.errors import CallTimeout, RunError
from slurm_rlhf.rollout.tp_engine import Command, diverged
from slurm_rlhf.rollout.tp_group import EnginePlace
from slurm_rlhf.workers.local_stream import LocalStream

WITH_ANSWER = ("start", "check", "sync_join", "sync_receive", "sleep", "wake_up")
"""Commands that a follower answers, with ["done", id, result] or ["failed", id, error]."""


class FollowerLinks:
    """Sends commands to the followers and hears their answers: `rollout.tp_engine.Followers` over local streams.

    Each stream has a thread that reads it. So a follower that dies, or is about to run another batch, is noticed even
    while the main thread is inside a collective that this follower will never join and that has no time-out.
    """

    def __init__(self, place: EnginePlace, streams: dict[int, LocalStream], on_failure: Callable[[str], None]) -> None:
        """`streams`: by TP rank. `on_failure` is called once, on any thread, with what to say; it must not block."""
        self._place = place
        self._streams = streams
        self._on_failure = on_failure
        self._inbox: dict[int, SimpleQueue[tuple[str, int, Any]]] = {rank: SimpleQueue() for rank in streams}
        self._digests: dict[int, tuple[bytes, int]] = {}  # batch -> digest, ranks that have not confirmed it
        self._early: dict[int, dict[int, bytes]] = {rank: {} for rank in streams}  # batch -> digest, ahead of ours
        self._lock = threading.Lock()
        self._failure = ""
        self._last_words: dict[int, str] = {}  # rank -> its last error
        self._sent = 0
        self._leaving = False
        for rank, stream in streams.items():
            stream.listen(partial(self._hear, rank), partial(self._lost, rank))

    def send(self, commands: list[Command]) -> None:
        """See `rollout.tp_engine.Followers.send`."""
        self._check()
        self._leaving = self._leaving or commands[-1][0] == "close"
        self._sent += 1
        for rank, stream in self._streams.items():
            try:
                stream.send([self._sent, commands])
            except RunError as error:
                self._lost(rank, error)
                self._check()

    def planned(self, batch: int, digest: bytes) -> None:
        """See `rollout.tp_engine.Followers.planned`."""
        with self._lock:
            early = [(rank, ahead.pop(batch)) for rank, ahead in self._early.items() if batch in ahead]
            if len(early) < len(self._streams):
                self._digests[batch] = (digest, len(self._streams) - len(early))
        for rank, theirs in early:
            if theirs != digest:
                self._fail(diverged(self._place, rank, batch))
        self._check()

    def agree(self, digest: bytes, batch: int, timeout_s: float) -> None:
        """See `rollout.tp_engine.Followers.agree`."""
        for rank in self._streams:
            if self._answer(rank, timeout_s) != digest:
                self._fail(diverged(self._place, rank, batch))
        self._check()

    def finish(self, timeout_s: float) -> list[Any]:
        """See `rollout.tp_engine.Followers.finish`."""
        return [self._answer(rank, timeout_s) for rank in self._streams]

    def _answer(self, rank: int, timeout_s: float) -> Any:
        who = f"{self._place}: its rank {self._place.rank(rank)}"
        while True:
            try:
                word, number, content = self._inbox[rank].get(timeout=timeout_s)
            except Empty:
                raise CallTimeout(f"{who} did not follow within {timeout_s:g} s") from None
            self._check()
            if number == self._sent:
                break
        if word == "failed":
            raise RunError(f"{who} failed: {content}")
        return content

    def _hear(self, rank: int, message: Any) -> None:
        word, number, content = message
        if word == "planned":
            self._compare(rank, number, content)
        else:
            if word == "failed":
                self._last_words[rank] = content
            self._inbox[rank].put((word, number, content))

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
            inbox.put(("failed", self._sent, reason))
        if first:
            self._on_failure(reason)

    def _check(self) -> None:
        if self._failure:
            raise RunError(self._failure)

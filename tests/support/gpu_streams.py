"""Streams of torch.cuda that notice who does not wait for whom. See gpu_standins.py."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from gpu_signatures import standin_only

Clock = dict[int, int]


class StreamRace(AssertionError):
    """Two streams touched the same memory, one of them writing, and nothing made the later wait for the earlier."""


class Streams:
    """The streams of a process, whose current one a thread has, and what the host knows to be over."""

    def __init__(self, syncs: Counter[str]) -> None:
        self.syncs = syncs
        self.host: Clock = {}
        self.lock = threading.RLock()
        self._local = threading.local()
        self._uses: dict[int, tuple[tuple[int, int] | None, Clock]] = {}
        self.known: list[Any] = []
        owner = self

        class Stream:
            """torch.cuda.Stream."""

            def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
                self._clock: Clock = {}
                self._pending: list[Any] = []
                self._number = len(owner.known)
                owner.known.append(self)

            def wait_stream(self, stream: Stream) -> None:
                self._take(stream._clock, stream._pending)

            def wait_event(self, event: Event) -> None:
                self._take(event._clock, event._pending)

            def record_event(self, event: Event | None = None) -> Event:
                event = event or Event()
                event.record(self)
                return event

            def query(self) -> bool:
                return all(work.over() for work in self._pending)

            def synchronize(self) -> None:
                owner.syncs["stream.synchronize"] += 1
                self.synchronize_quietly()

            @standin_only
            def synchronize_quietly(self) -> None:
                self.settle()
                owner.merge(owner.host, self._clock)

            @standin_only
            def settle(self) -> None:
                """Wait for what this stream waits for: a CPU computes at once what a GPU would have queued."""
                pending, self._pending = self._pending, []
                for work in pending:
                    work.finish()

            @standin_only
            def _take(self, clock: Clock, pending: Sequence[Any] = ()) -> None:
                owner.merge(self._clock, clock)
                self._pending += pending

            @standin_only
            def tick(self) -> tuple[int, int]:
                owner.merge(self._clock, owner.host)
                self._clock[self._number] = self._clock.get(self._number, 0) + 1
                return self._number, self._clock[self._number]

        class Event:
            """torch.cuda.Event."""

            def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
                self._clock: Clock = {}
                self._pending: list[Any] = []
                self._timed = enable_timing

            def record(self, stream: Any = None) -> None:
                stream = stream or owner.current()
                self._clock = dict(stream._clock)
                self._pending = list(stream._pending)

            def wait(self, stream: Any = None) -> None:
                (stream or owner.current()).wait_event(self)

            def query(self) -> bool:
                over = all(work.over() for work in self._pending)
                if over:
                    owner.merge(owner.host, self._clock)
                return over

            def synchronize(self) -> None:
                owner.syncs["event.synchronize"] += 1
                for work in self._pending:
                    work.finish()
                owner.merge(owner.host, self._clock)

            def elapsed_time(self, end_event: Event) -> float:
                if not (self._timed and end_event._timed):
                    raise ValueError("Both events must be created with argument 'enable_timing=True'.")
                return 1.0

        self.Stream, self.Event = Stream, Event
        self.default = Stream()

    def merge(self, into: Clock, other: Clock) -> None:
        with self.lock:
            for key, at in other.items():
                into[key] = max(into.get(key, 0), at)

    def current(self) -> Any:
        return getattr(self._local, "stream", self.default)

    def choose(self, stream: Any) -> Any:
        before = self.current()
        self._local.stream = stream
        return before

    def catch_up(self) -> None:
        """Before the current stream does anything."""
        self.current().settle()

    def touched(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], stream: Any = None) -> None:
        """The stream (the current one) reads and writes. Raises StreamRace."""
        with self.lock:
            stream = stream or self.current()
            at = stream.tick()
            for tensor in read:
                write, reads = self._uses.get(_key(tensor), (None, {}))
                self._ordered(stream, write, "reads what", "wrote")
                reads[at[0]] = at[1]
                self._uses[_key(tensor)] = (write, reads)
            for tensor in written:
                write, reads = self._uses.get(_key(tensor), (None, {}))
                self._ordered(stream, write, "writes where", "wrote")
                for each in reads.items():
                    if each != at:
                        self._ordered(stream, each, "writes where", "read")
                self._uses[_key(tensor)] = (at, {})

    def forget(self, storage: Any) -> None:
        """New memory: whoever had its address before is gone."""
        with self.lock:
            self._uses.pop(storage._cdata, None)

    def _ordered(self, stream: Any, use: tuple[int, int] | None, does: str, did: str) -> None:
        if use is not None and stream._clock.get(use[0], 0) < use[1]:
            raise StreamRace(
                f"stream {stream._number} {does} stream {use[0]} {did}, and does not wait for it: an event, "
                "wait_stream or work.wait() is missing"
            )


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

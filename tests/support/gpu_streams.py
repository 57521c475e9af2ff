"""Streams of torch.cuda that notice who does not wait for whom. See gpu_standins.py."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_signatures import standin_only

Clock = dict[int, int]
LAGS_S = {"writes": 0.01, "reads": 0.05}
"""Lags of a GPU behind its host, where several processes have mapped memory: writers are ahead of readers."""


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
        self._made_by: dict[int, int] = {}  # the stream on which the memory was allocated
        self._recorded: dict[int, set[int]] = {}  # streams of `record_stream`
        self._returned: dict[int, Clock] = {}  # last uses of what the allocator will hand out again on a stream
        self.mapped: dict[int, Any] = {}
        """The `Ledger` of memory that other processes have, too."""
        self.known: list[Any] = []
        owner = self

        class Stream:
            """torch.cuda.Stream."""

            def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
                self._clock: Clock = {}
                self._pending: list[Any] = []
                self._busy_until = 0.0
                self._number = len(owner.known)
                owner.known.append(self)

            def wait_stream(self, stream: Stream) -> None:
                self._take(stream._clock, stream._pending, stream._busy_until)

            def wait_event(self, event: Event) -> None:
                event._known()
                self._take(event._clock, event._pending, event._busy_until)

            def record_event(self, event: Event | None = None) -> Event:
                event = event or Event()
                event.record(self)
                return event

            def query(self) -> bool:
                return all(work.over() for work in self._pending) and time.monotonic() >= self._busy_until

            def synchronize(self) -> None:
                owner.syncs["stream.synchronize"] += 1
                self.synchronize_quietly()

            @standin_only
            def synchronize_quietly(self) -> None:
                self.settle()
                time.sleep(max(0.0, self._busy_until - time.monotonic()))
                owner.learn(self._clock)

            @standin_only
            def settle(self) -> None:
                """Wait for what this stream waits for: a CPU computes at once what a GPU would have queued."""
                pending, self._pending = self._pending, []
                for work in pending:
                    work.finish()

            @standin_only
            def _take(self, clock: Clock, pending: Sequence[Any] = (), busy_until: float = 0.0) -> None:
                owner.merge(self._clock, clock)
                self._pending += pending
                self._busy_until = max(self._busy_until, busy_until)

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
                self._busy_until = -1.0  # it was not recorded

            def record(self, stream: Any = None) -> None:
                stream = stream or owner.current()
                self._clock = dict(stream._clock)
                self._pending = list(stream._pending)
                self._busy_until = stream._busy_until

            def wait(self, stream: Any = None) -> None:
                (stream or owner.current()).wait_event(self)

            def query(self) -> bool:
                self._known()
                over = all(work.over() for work in self._pending) and time.monotonic() >= self._busy_until
                if over:
                    owner.learn(self._clock)
                return over

            def synchronize(self) -> None:
                self._known()
                owner.syncs["event.synchronize"] += 1
                for work in self._pending:
                    work.finish()
                time.sleep(max(0.0, self._busy_until - time.monotonic()))
                owner.learn(self._clock)

            @standin_only
            def _known(self) -> None:
                if self._busy_until < 0:
                    raise StreamRace("an event that was never recorded is over at once: it says nothing")

        self.Stream, self.Event = Stream, Event
        self.default = Stream()

    def merge(self, into: Clock, other: Clock) -> None:
        with self.lock:
            for key, at in other.items():
                into[key] = max(into.get(key, 0), at)

    def learn(self, clock: Clock) -> None:
        """The host knows that all up to `clock` is over, and other processes may rely on it."""
        with self.lock:
            self.merge(self.host, clock)
            for ledger in self.mapped.values():
                ledger.strike(self.host)

    def current(self) -> Any:
        return getattr(self._local, "stream", self.default)

    def choose(self, stream: Any) -> Any:
        before = self.current()
        self._local.stream = stream
        return before

    def catch_up(self) -> None:
        """Settle the current stream before it does anything."""
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
            for tensor in [*read, *written]:
                self._across(tensor, any(tensor is each for each in written), stream, at)

    def _across(self, tensor: torch.Tensor, writes: bool, stream: Any, at: tuple[int, int]) -> None:
        """Check memory that other processes have mapped: no GPU of theirs may be at work there."""
        ledger = self.mapped.get(_key(tensor))
        if ledger is not None:
            does = "writes" if writes else "reads"
            stream._busy_until = max(stream._busy_until, time.monotonic() + LAGS_S[does])
            low = tensor.storage_offset() * tensor.element_size()
            if other := ledger.enter(low, low + tensor.numel() * tensor.element_size(), does, at):
                raise StreamRace(f"stream {at[0]} {does} memory of a GPU where {other}, as far as its host knows")

    def allocated(self, storage: Any) -> None:
        """New memory, by the current stream: the allocator gives it what was freed there. Raises StreamRace."""
        with self.lock:
            self.freed(storage._cdata)
            stream = self.current()
            stream.tick()
            for number, at in self._returned.pop(stream._number, {}).items():
                if stream._clock.get(number, 0) < at:
                    raise StreamRace(
                        f"stream {stream._number} gets memory again that stream {number} still uses: it was freed "
                        "without record_stream, and nothing waits for that stream"
                    )
            self._made_by[storage._cdata] = stream._number

    def freed(self, key: int) -> None:
        """Nobody has the memory any more. The allocator waits for streams of `record_stream`, and for no others."""
        with self.lock:
            write, reads = self._uses.pop(key, (None, {}))
            recorded, made_by = self._recorded.pop(key, set()), self._made_by.pop(key, None)
            uses = dict([*([write] if write else []), *reads.items()])
            if made_by is not None:
                waited = {number: at for number, at in uses.items() if number not in recorded}
                self.merge(self._returned.setdefault(made_by, {}), waited)
            if ledger := self.mapped.pop(key, None):
                ledger.close()

    @property
    def record_stream(self) -> Callable[[torch.Tensor, Any], None]:
        """torch.Tensor.record_stream; see `freed`."""

        def record_stream(tensor: torch.Tensor, s: Any) -> None:
            self._recorded.setdefault(_key(tensor), set()).add(s._number)

        return record_stream

    def _ordered(self, stream: Any, use: tuple[int, int] | None, does: str, did: str) -> None:
        if use is not None and stream._clock.get(use[0], 0) < use[1]:
            raise StreamRace(
                f"stream {stream._number} {does} stream {use[0]} {did}, and does not wait for it: an event, "
                "wait_stream or work.wait() is missing"
            )


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

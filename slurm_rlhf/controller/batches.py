"""The batches that steps train on: sampled when a step asks for one, or ahead, while the actor trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from slurm_rlhf.records import EngineLoad, Prompt, Trajectory


@dataclass(slots=True)
class Batch:
    """What one step trains on."""

    step: int
    prompts: list[Prompt]
    trajectories: list[Trajectory]  # `Sampling.n` for each prompt, in (prompt, sample) order
    loads: dict[int, EngineLoad]  # of each engine meanwhile
    seconds: float  # from the first request to the last response
    order: dict[str, Any]  # state of the prompt order once a step has trained on this batch


class Batches(Protocol):
    """Gives each step its batch, in their order."""

    def take(self, step: int) -> Batch:
        """Wait for the batch of `step`; the engines' calls have the time-outs. Raises what sampling raised."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Keep batches from being sampled, so that the engines can be asked for something else."""
        ...

    def close(self) -> None:
        """Begin no further batch. What is in flight is dropped with the engines; it can be sampled again."""
        ...


class OnDemand:
    """Implements `Batches`: samples each batch when its step asks, with the weights that the step trains."""

    def __init__(self, sample: Callable[[int], Batch]) -> None:
        self._sample = sample

    def take(self, step: int) -> Batch:
        return self._sample(step)

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class Ahead:
    """Implements `Batches`: a thread samples one batch after the other, at most `size` ahead of the step in training.

    So when a step trains on its batch, no token of it is older than `size` updates: the batch of step k is begun after
    that of step k - size was taken, when k - size - 1 updates were in the engines, and trained on after k - 1.
    """

    def __init__(self, sample: Callable[[int], Batch], size: int, last: int) -> None:
        """`size`: at least 1; `last`: the last step of the run. The first `take` starts it all."""
        self._sample = sample
        self._last = last
        # A stop may interrupt `take` anywhere: these have no lock that it could leave taken.
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        for _ in range(size):
            self._permits.put(None)
        self._engines = threading.Lock()
        self._free = threading.Event()  # nobody waits for the engines, so the next batch may be begun
        self._free.set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def take(self, step: int) -> Batch:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(step,), name="batches", daemon=True)
            self._thread.start()
        found = self._ready.get()
        if isinstance(found, BaseException):
            self._ready.put(found)
            raise found
        self._permits.put(None)
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._free.clear()
        try:
            with self._engines:
                yield
        finally:
            self._free.set()

    def close(self) -> None:
        self._closed = True
        self._permits.put(None)

    def _work(self, first: int) -> None:
        """Sample one batch after the other. `close`, and the time-outs of the engines' calls, end its waits."""
        for step in range(first, self._last + 1):
            self._permits.get()
            self._free.wait()
            if self._closed:
                return
            with self._engines:
                try:
                    found: Batch | BaseException = self._sample(step)
                except BaseException as error:
                    found = error
            self._ready.put(found)
            if isinstance(found, BaseException):
                return

"""A process that is slowed down, and who was given how much when."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from slurm_rlhf.wire.calls import GenerateBatch
from slurm_rlhf.wire.handles import EngineHandle


@contextmanager
def slowed(process: int, factor: float) -> Iterator[None]:
    """The process runs 1 / factor of the time."""
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            os.kill(process, signal.SIGSTOP)
            over.wait(0.01 * (factor - 1))
            os.kill(process, signal.SIGCONT)
            over.wait(0.01)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Recorder:
    """When which engine was given how many sequences, and when it gave them back."""

    def __init__(self, engines: EngineHandle) -> None:
        self.engines = engines
        self.given: list[tuple[float, int, int]] = []
        self.returned: list[tuple[float, int, int]] = []

    @property
    def ready(self) -> list[int]:
        return self.engines.ready

    @property
    def world(self) -> int:
        return self.engines.world

    def call(self, engine: int, method: Any, batch: GenerateBatch, /) -> Future[Any]:
        count = batch.answer  # of the responses, those that this call brings
        self.given.append((time.monotonic(), engine, count))
        future = self.engines.call(engine, method, batch)
        future.add_done_callback(lambda _: self.returned.append((time.monotonic(), engine, count)))
        return future

    def held(self, engine: int, when: float) -> int:
        """Sequences that an engine has at a time."""
        return sum(count * (1 if at <= when else 0) for at, e, count in self.given if e == engine) - sum(
            count * (1 if at <= when else 0) for at, e, count in self.returned if e == engine
        )

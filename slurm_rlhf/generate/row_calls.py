"""Hands rows to the engines of a job, and collects their answers and losses for the one thread that leads it."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from slurm_rlhf.groups.engines import Engines
from slurm_rlhf.wire.calls import EngineCalls, GenerateAnswer, GenerateBatch
from slurm_rlhf.wire.handles import EngineHandle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answered:
    """Says that an engine has answered the call for a row, or failed it."""

    engine: int
    row: int
    call: Future[GenerateAnswer]


@dataclass(frozen=True, slots=True)
class Gone:
    """Says that an engine is lost, and why."""

    engine: int
    why: str


@dataclass(slots=True)
class RowCalls:
    """Calls the engines that are up. Used by one thread; what other threads learn comes to it through `_news`."""

    handle: EngineHandle
    engines: Engines
    gone: dict[int, str] = field(default_factory=dict, init=False)
    """Engine that is lost -> why."""
    _news: SimpleQueue[Answered | Gone] = field(default_factory=SimpleQueue, init=False)

    def __post_init__(self) -> None:
        self.engines.tell = self._lost

    @property
    def ready(self) -> list[int]:
        """List the engines that can be called."""
        return self.handle.ready

    def _lost(self, text: str, kind: str, engine: int) -> None:
        log.error("%s", text)
        self._news.put(Gone(engine, self.engines.why(engine)))

    def ask(self, engine: int, row: int, batch: GenerateBatch) -> None:
        """Hand a row to an engine; the answer comes as news."""
        call = self.handle.call(engine, EngineCalls.generate, batch)
        call.add_done_callback(lambda done: self._news.put(Answered(engine, row, done)))

    def wait(self, seconds: float) -> list[Answered | Gone]:
        """Wait for news, at most `seconds`, and return all there is; nothing follows on the `Gone` of an engine."""
        found: list[Answered | Gone] = []
        try:
            found.append(self._news.get(timeout=seconds))
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            return [each for each in found if self._counts(each)]

    def _counts(self, news: Answered | Gone) -> bool:
        """Keep `gone` up to date; return False for news that no longer matter."""
        if news.engine in self.gone:
            return False
        if isinstance(news, Gone):
            self.gone[news.engine] = news.why
            return True
        error = news.call.exception()
        return not (error and ": EngineBroken: " in str(error) and self.handle.goes_on_without(news.engine, error))

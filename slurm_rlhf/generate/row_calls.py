"""Has the rows of a job sampled, and collects answers and losses of engines for the one thread that leads the job."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from slurm_rlhf.groups.engines import Engines
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory
from slurm_rlhf.sampling.batches import PromptGroup
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.group_rules import GroupState
from slurm_rlhf.sampling.scheduler import EngineWork, Scheduler
from slurm_rlhf.wire.handles import EngineHandle

log = logging.getLogger(__name__)

VERSION = 0
"""Version of the weights, which do not change; the seed of each request depends on it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Says that an engine has answered a row, or failed it."""

    engine: int
    row: int
    found: list[Trajectory]
    load: EngineLoad  # work of the engine since its last answer
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """Says that an engine is lost, and why."""

    engine: int
    why: str


class RowCalls(Scheduler):
    """Asks the engines that `RowQueue` has chosen; the rows that an engine fails go back to it.

    `ask` and `wait` are for the thread that leads the job; what the loop learns comes to it as news.
    """

    def __init__(self, handle: EngineHandle, engines: Engines, seed: int, width: int) -> None:
        super().__init__(handle, seed, width, urgent=True)
        self.handle, self.engines = handle, engines
        self.gone: dict[int, str] = {}
        """Engine that is lost -> why."""
        self._news: SimpleQueue[Answered | Gone] = SimpleQueue()
        self._episodes = Episodes(self)
        self.close = self._episodes.close
        engines.tell = self._lost

    def _lost(self, text: str, kind: str, engine: int) -> None:
        log.error("%s", text)
        self._news.put(Gone(engine, self.engines.why(engine)))

    def ask_row(self, engine: int, prompt: Prompt, sampling: Sampling) -> None:
        """Have an engine sample the responses to a row; they come as news."""
        self.post(self._begin, engine, PromptGroup(prompt.index, prompt, GroupState(VERSION), sampling, VERSION))

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
        error = news.error
        return not (error and ": EngineBroken: " in str(error) and self.handle.goes_on_without(news.engine, error))

    # On the loop.

    def _begin(self, engine: int, group: PromptGroup) -> None:
        group.work = self._work(engine)
        self._episodes.begin(group, partial(self._end, engine))

    def _end(self, engine: int, group: PromptGroup, error: BaseException | None = None) -> None:
        load = self.loads.pop(engine, EngineLoad())
        self._news.put(Answered(engine, group.place, group.ordered(), load, error))

    def _failed(self, work: EngineWork, error: BaseException) -> None:
        work.lost = True
        del self._works[work.engine]
        for request in work.owed.values():
            request.answer.cancel()  # its episode ends: a row that is tried again has others
        for group in {request.group: None for request in work.owed.values()}:
            self._end(work.engine, group, error)

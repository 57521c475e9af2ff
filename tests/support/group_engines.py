"""Engines for a stream of groups that finish a response when the test says so, and what else a stream is made with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from waiting import HANG_S

from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.errors import RemoteError, RoleDied
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory, VersionSpan
from slurm_rlhf.rewards.function import Rewards
from slurm_rlhf.rewards.model import Scoring
from slurm_rlhf.sampling.batches import Batch, FilterCounts
from slurm_rlhf.sampling.engine_feed import EngineFeed
from slurm_rlhf.sampling.group_stream import GroupStream, Rule
from slurm_rlhf.wire.calls import EngineCalls, GenerateAnswer, GenerateBatch, Sampled

IDS = np.array([3], dtype=np.int32)


Row = tuple[int, int, int, int, int]
"""Of a response in flight: engine, place, prompt, sample, version at its begin."""


class Engines:
    """In place of `EngineHandle`: keeps requests open until the test finishes them. Calls come from any thread."""

    def __init__(self, count: int = 2) -> None:
        self.ready = list(range(count))
        self.world = count
        self.lost: list[int] = []
        self.death = RoleDied("it was killed")
        self.version = 0
        self.open: list[Row] = []
        self.seeds: dict[int, int] = {}  # place -> version that seeds it
        self._calls: dict[int, list[Future[GenerateAnswer]]] = {index: [] for index in range(count)}
        self._landed: list[Row] = []  # what no call has fetched yet
        self._lock = threading.Lock()

    def call(self, engine: int, method: Any, batch: GenerateBatch | None = None) -> Future[GenerateAnswer]:
        future: Future[GenerateAnswer] = Future()
        if batch is None:
            assert method is EngineCalls.drop
            self._drop(engine)
            return future
        with self._lock:
            if engine in self.lost:
                future.set_exception(self.death)
                return future
            self._calls[engine].append(future)
            for place, prompt, _ in batch.prompts:
                self.seeds[place] = batch.version
                for sample in range(batch.sampling.n):
                    self.open.append((engine, place, prompt, sample, self.version))
        self._answer()
        return future

    def rows(self) -> list[Row]:
        """Those in flight."""
        with self._lock:
            return list(self.open)

    def places(self) -> list[int]:
        """Those in flight."""
        with self._lock:
            return sorted({place for _, place, _, _, _ in self.open})

    def finish(self, *places: int) -> None:
        """Let all responses of these groups land; the engine's calls are answered in their order, as a real one's."""
        with self._lock:
            done = [row for row in self.open if row[1] in places]
            self.open = [row for row in self.open if row[1] not in places]
            self._landed += done
        self._answer()

    def _answer(self) -> None:
        """Hand what has landed to the calls that wait, one to each; the rest waits for calls, as in a real engine."""
        with self._lock:
            calls, rest = [], []
            for row in self._landed:
                waiting = self._calls[row[0]]
                if waiting:
                    calls.append((waiting.pop(0), row))
                else:
                    rest.append(row)
            self._landed = rest
        for call, (engine, place, prompt, sample, version) in calls:
            trajectory = answer(prompt, sample, version, engine)
            call.set_result(GenerateAnswer([Sampled(place, trajectory)], EngineLoad(tokens=1, responses=1)))

    def _drop(self, engine: int) -> None:
        with self._lock:
            self.open = [row for row in self.open if row[0] != engine]
            self._landed = [row for row in self._landed if row[0] != engine]
            calls, self._calls[engine] = self._calls[engine], []
        for call in calls:
            call.set_exception(RemoteError("told to drop its requests"))

    def lose(self, engine: int) -> None:
        """Let an engine die: its calls fail, and the run goes on without it."""
        self.ready = [other for other in self.ready if other != engine]
        with self._lock:
            self.lost.append(engine)
            self.open = [row for row in self.open if row[0] != engine]
            self._landed = [row for row in self._landed if row[0] != engine]
            calls, self._calls[engine] = self._calls[engine], []
        for call in calls:
            call.set_exception(self.death)

    def goes_on_without(self, engine: int, error: BaseException) -> bool:
        return error is self.death

    def fail(self, error: Exception) -> None:
        """Let the oldest call of the first engine fail."""
        self._calls[0].pop(0).set_exception(error)


def prompt_set(path: Path, count: int) -> PromptSet:
    """So many prompts, each with its number as its text."""
    return PromptSet(path, [Prompt(i, f"{i}", IDS, label=i) for i in range(count)], 0)


def order_of(count: int, batch: int, episodes: int = 1) -> PromptOrder:
    """In the order of the file, so that a place is a prompt."""
    return PromptOrder(count, batch, episodes, 0, shuffle=False)


def answer(prompt: int, sample: int, version: int = 0, engine: int = 0) -> Trajectory:
    """A response of one token."""
    floats, mask = np.zeros(1, np.float32), np.ones(1, np.bool_)
    spans = [VersionSpan(0, 1, version)]
    return Trajectory(prompt, sample, IDS, IDS, floats, mask, "stop", f"{prompt}", spans, engine)


BATCH = 4
SAMPLING = Sampling(n=2)


class Judge:
    """Gives a group spread if its prompt is in `good`; in place of `Scoring`."""

    def __init__(self, good: set[int]) -> None:
        self.good = good
        self.calls: list[list[int]] = []
        self.error: Exception | None = None

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        if self.error:
            raise self.error
        self.calls.append([prompt.index for prompt in prompts[:: SAMPLING.n]])
        assert [t.prompt for t in trajectories] == [prompt.index for prompt in prompts]
        hits = [float(t.sample == 0 and t.prompt in self.good) for t in trajectories]
        values = np.array(hits, dtype=np.float32)
        return Rewards(values, values, {"calls": np.array([1.0], dtype=np.float32)})


class Streamed:
    """A stream over engines of the test."""

    def __init__(
        self, path: Path, rule: Rule, prompts: int = 40, order: PromptOrder | None = None, judge: Judge | None = None
    ) -> None:
        """`prompts`: rows of the data set; `judge`: with dynamic sampling."""
        self.engines = Engines()
        self.order = order or order_of(prompts, BATCH)
        feed = EngineFeed(cast("Any", self.engines), run_seed=1, max_num_seqs=64)
        counts = FilterCounts([]) if judge else None
        scoring = cast("Scoring | None", judge)
        self.stream = GroupStream(rule, prompt_set(path, prompts), self.order, SAMPLING, feed, scoring, counts)

    @contextmanager
    def taking(self, step: int) -> Iterator[list[Batch | Exception]]:
        """A step that waits for its batch in a thread of its own: filled when the block is over."""
        found: list[Batch | Exception] = []

        def take() -> None:
            try:
                found.append(self.stream.take(step))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield found
        thread.join(HANG_S)
        assert found


def places(batch: Batch | Exception) -> list[int]:
    """The prompts of a batch, whose responses are complete and in their order."""
    assert isinstance(batch, Batch), batch
    assert [(t.prompt, t.sample) for t in batch.trajectories] == [(p.index, s) for p in batch.prompts for s in (0, 1)]
    return [prompt.index for prompt in batch.prompts]

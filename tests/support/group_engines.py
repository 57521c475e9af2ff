"""Engines for a stream of groups that finish a response when the test says so, and what else a stream is made with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from sampled_responses import response
from waiting import HANG_S, until

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.errors import RemoteError, RoleDied
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory, VersionSpan
from slurm_rlhf.rewards.scored import Rewards, Scoring
from slurm_rlhf.sampling.batches import Batch
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.group_stream import GroupStream
from slurm_rlhf.sampling.scheduler import Scheduler
from slurm_rlhf.wire.calls import EngineCalls, GenerateAnswer, GenerateBatch

IDS = np.array([3], dtype=np.int32)


Row = tuple[int, int, int, int, str]
"""A response in flight: engine, prompt, sample, version at its begin, key."""


class Engines:
    """Stands in for `EngineHandle`: keeps requests open until the test finishes them. Calls come from any thread."""

    def __init__(self, count: int = 2) -> None:
        self.ready = list(range(count))
        self.world = count
        self.lost: list[int] = []
        self.death = RoleDied("it was killed")
        self.version = 0
        self.open: list[Row] = []
        self.seeds: dict[int, int] = {}  # prompt -> round that seeds it
        self.messages: list[list[tuple[int, int]]] = []  # prompt and sample of what each call has asked for
        self._calls: dict[int, list[tuple[Future[GenerateAnswer], int]]] = {index: [] for index in range(count)}
        self._landed: dict[int, list[Trajectory]] = {index: [] for index in range(count)}  # not fetched yet
        self._lock = threading.RLock()

    def call(self, engine: int, method: Any, batch: GenerateBatch | None = None) -> Future[GenerateAnswer]:
        future: Future[GenerateAnswer] = Future()
        if batch is None:
            assert method is EngineCalls.drop
            self._drop(engine, RemoteError("asked to drop its requests"))
            return future
        with self._lock:
            if engine in self.lost:
                future.set_exception(self.death)
                return future
            self._calls[engine].append((future, batch.least))
            self.messages.append([(one.prompt, one.sample) for one in batch.asked])
            for one in batch.asked:
                self.seeds[one.prompt] = one.round
                self.open.append((engine, one.prompt, one.sample, self.version, str(one.number)))
        self._answer()
        return future

    def rows(self) -> list[Row]:
        """List the responses in flight."""
        with self._lock:
            return list(self.open)

    def places(self) -> list[int]:
        """The prompts in flight."""
        return sorted({prompt for _, prompt, *_ in self.rows()})

    def finish(self, *places: int) -> None:
        """Let all responses to these prompts land; the engine's calls are answered as a real one's."""
        with self._lock:
            for row in [row for row in self.open if row[1] in places]:
                self.open.remove(row)
                engine, prompt, sample, version, key = row
                self._landed[engine].append(answer(prompt, sample, version, engine, key))
        self._answer()

    def _answer(self) -> None:
        with self._lock:
            answered = []
            for engine, calls in self._calls.items():
                landed, busy = self._landed[engine], any(row[0] == engine for row in self.open)
                while calls and (len(landed) >= calls[0][1] or not busy):
                    answered.append((calls.pop(0)[0], list(landed)))
                    landed.clear()
        for call, found in answered:
            call.set_result(GenerateAnswer(found, EngineLoad(tokens=len(found), responses=len(found))))

    def _drop(self, engine: int, error: Exception) -> None:
        with self._lock:
            self.open = [row for row in self.open if row[0] != engine]
            self._landed[engine] = []
            calls, self._calls[engine] = self._calls[engine], []
        for call, _ in calls:
            call.set_exception(error)

    def lose(self, engine: int) -> None:
        """Let an engine die: its calls fail, and the run goes on without it."""
        self.ready = [other for other in self.ready if other != engine]
        self.lost.append(engine)
        self._drop(engine, self.death)

    def goes_on_without(self, engine: int, error: BaseException) -> bool:
        return error is self.death

    def fail(self, error: Exception) -> None:
        """Let the oldest call of the first engine fail."""
        self._calls[0].pop(0)[0].set_exception(error)


def prompt_set(count: int) -> PromptSet:
    """Make `count` prompts, each with its number as its text."""
    return PromptSet([Prompt(i, f"{i}", IDS, label=i) for i in range(count)], 0)


def order_of(count: int, batch: int, episodes: int = 1) -> PromptOrder:
    """Make the order of the file, so that a place is a prompt."""
    return PromptOrder(count, batch, episodes, 0, shuffle=False)


def answer(prompt: int, sample: int, version: int = 0, engine: int = 0, key: str = "") -> Trajectory:
    """A response of one token."""
    return response(prompt, f"{prompt}", sample, versions=[VersionSpan(0, 1, version)], engine=engine, key=key)


BATCH = 4
SAMPLING = Sampling(n=2)


class Judge:
    """Gives a group spread if its prompt is in `good`; in place of `Scoring`."""

    streams = False

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


def limits(size: int | None = None, at_once: int = BATCH, tries: int = 10, ahead: float = 8.0) -> Config:
    """The keys that limit the groups; `ahead`: share of a batch that older policies may begin."""
    config = Config()
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = BATCH, SAMPLING.n
    config.rollout.vllm_generate_batch_size, config.algo.dynamic_filtering_max_tries = at_once, tries
    config.vllm.sync_mode = "inflight" if size else "drain"
    config.train.async_queue_size, config.train.staleness_threshold = size or 1, ahead
    return config


class Streamed:
    """A stream over engines of the test."""

    def __init__(
        self,
        config: Config,
        prompts: int = 40,
        order: PromptOrder | None = None,
        judge: Judge | None = None,
        last: int = 10,
    ) -> None:
        """`prompts`: rows of the data set; `judge`: with dynamic sampling."""
        config.algo.dynamic_filtering_enable = judge is not None
        self.engines = Engines()
        self.order = order or order_of(prompts, BATCH)
        self.episodes = Episodes(Scheduler(cast("Any", self.engines), 1, 64, urgent=True))
        rows, scoring = prompt_set(prompts), cast("Scoring", judge or SimpleNamespace(streams=False))
        self.stream = GroupStream(config, rows, self.order, last, self.episodes, scoring, lambda _: nullcontext())

    def begun(self, place: int) -> None:
        """Wait until the engines were asked for all places before this one."""
        until(lambda: self.order.place == place and set(range(place)) <= self.engines.seeds.keys())

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

    def took(self, step: int, begun: int, *finished: int) -> Batch | Exception:
        """Take a batch: `finished` land when the engines were asked for all places before `begun`."""
        with self.taking(step) as found:
            self.begun(begun)
            self.engines.finish(*finished)
        return found[0]

    def flow(self, found: list[Batch | Exception], most: int | None = None) -> None:
        """Let responses land, those of the first `most` prompts at a time, until a batch is found."""
        while not found:
            self.engines.finish(*self.engines.places()[:most])
            time.sleep(0.002)


def places(batch: Batch | Exception) -> list[int]:
    """The prompts of a batch, whose responses are complete and in their order."""
    assert isinstance(batch, Batch), batch
    assert [(t.prompt, t.sample) for t in batch.trajectories] == [(p.index, s) for p in batch.prompts for s in (0, 1)]
    return [prompt.index for prompt in batch.prompts]

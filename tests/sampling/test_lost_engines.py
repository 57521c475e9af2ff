"""Engines that die under a batch or a stream: what was finished stays, the rest is sampled by the others."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from group_engines import IDS, SAMPLING, Engines, Streamed, limits, places
from sampled_responses import response
from waiting import HANG_S, until

from slurm_rlhf.errors import EpisodeError, RoleDied
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.scheduler import Scheduler, Waves


def owners(engines: Engines, engine: int) -> list[int]:
    """The places in flight on an engine."""
    return sorted({prompt for owner, prompt, *_ in engines.rows() if owner == engine})


class Batch:
    """Episodes that a thread of its own waits for, over engines that finish one response when the test says so."""

    def __init__(
        self, engines: Engines, count: int, deterministic: bool, admit: Any = None, width: int = 2, play: Any = None
    ) -> None:
        self.engines = engines
        scheduler = (Waves if deterministic else Scheduler)(cast("Any", engines), 1, width)
        episodes = Episodes(scheduler, admit, cast("Any", play and SimpleNamespace(begin=play)))
        prompts = [Prompt(index, f"{index}", IDS) for index in range(count)]
        self._found = in_thread(lambda: episodes.sample(prompts, SAMPLING, 1), "sampling")

    def result(self) -> list[tuple[int, int, int]]:
        """Return the prompt, the sample and the engine of each response."""
        found = self._found.result(HANG_S)
        return [(each.prompt, each.sample, each.engine) for each in found]

    def done(self) -> bool:
        return self._found.done()

    def finish_all(self) -> None:
        """Let engines finish what they have until the batch is complete."""
        while not self._found.done():
            self.engines.finish(*self.engines.places())
            threading.Event().wait(0.002)


def test_the_part_of_a_lost_engine_goes_whole_to_one_that_has_done_its_own() -> None:
    engines = Engines()
    batch = Batch(engines, 6, deterministic=True)
    until(lambda: owners(engines, 0) == [0, 2, 4] and owners(engines, 1) == [1, 3, 5])
    assert engines.messages == [[(prompt, k) for prompt in part for k in (0, 1)] for part in ((0, 2, 4), (1, 3, 5))]
    engines.lose(1)
    engines.finish(0, 2, 4)
    until(lambda: owners(engines, 0) == [1, 3, 5])  # as many at a time as the lost one had
    engines.finish(1, 3, 5)
    assert batch.result() == [(prompt, sample, 0) for prompt in range(6) for sample in (0, 1)]


def test_what_a_lost_engine_had_finished_is_kept_and_the_rest_goes_to_others() -> None:
    engines = Engines()
    batch = Batch(engines, 8, deterministic=False)
    until(lambda: bool(owners(engines, 1)))
    kept = owners(engines, 1)[0]
    engines.finish(kept)
    until(lambda: owners(engines, 1) != [] and kept not in owners(engines, 1))
    engines.lose(1)
    batch.finish_all()
    found = batch.result()
    assert [(prompt, sample) for prompt, sample, _ in found] == [(p, s) for p in range(8) for s in (0, 1)]
    assert {engine for prompt, _, engine in found if prompt != kept} == {0}
    assert {engine for prompt, _, engine in found if prompt == kept} == {1}


def test_a_turn_asked_for_when_its_engine_is_known_to_be_lost_goes_to_another() -> None:
    engines, acted = Engines(), threading.Event()

    class TwoTurns:
        token_ids, limit, turn = IDS, 4, 0

        def __init__(self, *_: Any) -> None: ...

        async def start(self) -> None: ...

        async def take(self, found: Trajectory) -> Trajectory | None:
            while not acted.is_set():
                await asyncio.sleep(0.001)
            self.turn += 1
            return found if self.turn == 2 else None

        def drop(self) -> None: ...

    batch = Batch(engines, 4, deterministic=False, width=8, play=TwoTurns)
    until(lambda: owners(engines, 0) == [0, 2] and owners(engines, 1) == [1, 3])
    engines.finish(1)
    engines.lose(1)
    until(lambda: owners(engines, 0) == [0, 2, 3])
    acted.set()
    until(lambda: owners(engines, 0) == [0, 1, 2, 3])
    batch.finish_all()
    assert batch.result() == [(prompt, sample, 0) for prompt in range(4) for sample in (0, 1)]


@pytest.mark.parametrize("deterministic", [True, False])
def test_episodes_that_are_lost_before_their_first_turn_take_no_engines_room(deterministic: bool) -> None:
    dropped: list[Lost] = []

    class Lost:
        def __init__(self, prompt: Prompt, sampling: Sampling, sample: int) -> None:
            self.whole = response(prompt.index, sample=sample)

        async def start(self) -> Trajectory:
            return self.whole

        def drop(self) -> None:
            dropped.append(self)

    class Broken(Lost):
        async def start(self) -> Trajectory:
            raise EpisodeError("8 of 8 episodes are lost")

    batch = Batch(Engines(), 40, deterministic, play=Lost)
    until(batch.done, "the last episode")
    assert [(prompt, sample) for prompt, sample, _ in batch.result()] == [(p, s) for p in range(40) for s in (0, 1)]
    assert len(dropped) == 80
    with pytest.raises(EpisodeError, match="8 of 8 episodes are lost"):
        Batch(Engines(), 4, deterministic, play=Broken).result()


class Pool:
    """Takes engines of the test back in, which have the weights from then on; in place of `EnginePool`."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.started: list[int] = []

    def admit(self, version: int) -> list[int]:
        found, self.started = self.started, []
        for engine in found:
            assert not owners(self.engines, engine), "it was asked before it had the weights"
            self.engines.lost.remove(engine)
        self.engines.ready = sorted([*self.engines.ready, *found])
        return found


@pytest.mark.parametrize("seed", range(5))
def test_every_response_arrives_once_under_any_losses_and_joins_and_no_engine_owes_too_much(seed: int) -> None:
    engines, dice, width, most = Engines(3), random.Random(seed), 6, {0: 0}
    pool = Pool(engines)
    batch = Batch(engines, 40, deterministic=False, admit=pool.admit, width=width)
    until(lambda: bool(engines.open))
    while not batch.done():
        held = Counter(engine for engine, *_ in engines.rows())
        most = {engine: max(most.get(engine, 0), held[engine]) for engine in range(3)}
        if engines.ready and dice.random() < 0.1:
            engines.lose(dice.choice(engines.ready))
        elif away := [each for each in engines.lost if each not in pool.started]:
            pool.started += away[: dice.random() < 0.2]
        if waiting := engines.places():
            engines.finish(*dice.sample(waiting, dice.randrange(len(waiting)) + 1))
        threading.Event().wait(0.001)
    assert [(prompt, sample) for prompt, sample, _ in batch.result()] == [(p, s) for p in range(40) for s in (0, 1)]
    assert max(most.values()) <= width + -(-width // 4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_where_the_last_engine_dies_the_batch_waits_for_it_to_come_back(deterministic: bool) -> None:
    engines, asked = Engines(), threading.Event()

    def rescue(version: int) -> list[int]:
        asked.set()
        return list(engines.ready)

    batch = Batch(engines, 4, deterministic, rescue)
    until(lambda: bool(owners(engines, 0)) and bool(owners(engines, 1)))
    engines.lose(0)
    engines.lose(1)
    assert asked.wait(HANG_S)
    engines.lost, engines.ready = [], [1]
    batch.finish_all()
    assert batch.result() == [(prompt, sample, 1) for prompt in range(4) for sample in (0, 1)]


def test_without_a_way_to_give_it_weights_the_loss_of_the_last_engine_is_an_error() -> None:
    engines = Engines()
    batch = Batch(engines, 4, deterministic=False)
    until(lambda: bool(owners(engines, 0)) and bool(owners(engines, 1)))
    engines.lose(0)
    engines.lose(1)
    with pytest.raises(RoleDied, match="no engine is left"):
        batch.result()


def test_groups_of_a_lost_engine_are_sampled_by_the_others_once_and_whole() -> None:
    run = Streamed(limits(1, ahead=1.0))
    with run.taking(1) as found:
        run.begun(8)
        mine, others = owners(run.engines, 1), owners(run.engines, 0)
        assert mine
        assert others
        run.engines.lose(1)
        until(lambda: owners(run.engines, 0) == sorted([*mine, *others]))
        run.engines.finish(*mine)
    assert places(found[0]) == mine
    assert {t.engine for t in found[0].trajectories} == {0}  # type: ignore[union-attr]


def test_a_stream_whose_last_engine_died_takes_the_one_that_comes_back() -> None:
    run = Streamed(limits(1, ahead=1.0))
    back = threading.Event()

    def rescue(version: int) -> bool:
        if back.is_set():
            run.engines.lost, run.engines.ready = [], [1]
        return back.is_set()

    run.episodes._admit = rescue
    with run.taking(1) as found:
        run.begun(8)
        run.engines.lose(0)
        run.engines.lose(1)
        back.set()
        until(lambda: owners(run.engines, 1) == list(range(8)))
        run.engines.finish(*range(4))
    assert places(found[0]) == [0, 1, 2, 3]

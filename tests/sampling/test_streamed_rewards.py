"""Rewards that are computed while other responses are sampled."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

from group_engines import Streamed, limits, places
from waiting import until

from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.scored import Rewards


class Begun:
    """Notes which responses are to be scored, in place of `Scoring`."""

    streams = True

    def __init__(self) -> None:
        self.asked: dict[int, Future[Rewards]] = {}
        self.calls: list[list[int]] = []

    def begin_each(
        self, prompts: list[Prompt], trajectories: list[Trajectory], step: int, size: int
    ) -> list[Future[Rewards]]:
        owners = [prompt.index for prompt in prompts][::size]
        assert [(found.prompt, found.sample) for found in trajectories] == [(a, b) for a in owners for b in (0, 1)]
        self.calls.append(owners)
        return [self.asked.setdefault(place, Future()) for place in owners]


def test_a_group_is_scored_as_soon_as_it_is_complete() -> None:
    run, scoring = Streamed(limits(1)), Begun()
    run.stream.reward = cast("Any", scoring)
    with run.taking(1) as found:
        until(lambda: run.engines.places() == list(range(8)))
        run.engines.finish(2)
        until(lambda: [*scoring.asked] == [2])
        assert not found
        together = [prompt for engine, prompt, sample, *_ in run.engines.rows() if engine == sample == 0][:2]
        run.engines.finish(*together)
        until(lambda: len(scoring.asked) == 3)
        run.engines.finish(*range(8))
    batch = found[0]
    assert batch.asked == [scoring.asked[place] for place in places(batch)]
    assert sorted(scoring.calls[1]) == sorted(together), "a call for each of two groups that ended at once"

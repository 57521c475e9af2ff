"""Requests of an episode's coroutine to the scheduler."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from waiting import until

from slurm_rlhf.records import Prompt, Sampling
from slurm_rlhf.sampling.batches import GroupState, PromptGroup
from slurm_rlhf.sampling.episodes import Episodes

IDS = np.array([1], dtype=np.int32)


class ThreeTurns:
    """An episode of three turns."""

    token_ids, limit = IDS, 4

    def __init__(self, *_: Any) -> None:
        self.turns = 0

    async def start(self) -> None:
        return None

    async def take(self, found: str) -> str | None:
        self.turns += 1
        return f"whole: {found}" if self.turns == 3 else None

    def drop(self) -> None:
        return


def test_turns_are_counted_from_0_as_their_seeds_come_of_them() -> None:
    asked: list[int] = []

    def ask(group: PromptGroup, sample: int, turn: int, *_: Any) -> asyncio.Future[str]:
        asked.append(turn)
        found = asyncio.get_running_loop().create_future()
        found.set_result(f"turn {turn}")
        return found

    scheduler: Any = SimpleNamespace(post=None, ask=ask, ended=lambda: None, flush=lambda: None, stop=lambda: None)
    environments: Any = SimpleNamespace(begin=ThreeTurns)
    episodes, ended = Episodes(scheduler, environments=environments), []
    group = PromptGroup(0, Prompt(0, "2+2=", IDS), GroupState(1), Sampling(n=1), 1)
    try:
        episodes.post(lambda: asyncio.ensure_future(episodes._episode(group, 0, ended.append)))
        until(lambda: ended, "the end of the group")
    finally:
        episodes.close()
    assert asked == [0, 1, 2]
    assert group.trajectories == ["whole: turn 2"]

"""What becomes of the episodes of rows whose engine fails."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
from waiting import HANG_S, until

from slurm_rlhf.errors import RunError
from slurm_rlhf.generate.rows import RowCalls
from slurm_rlhf.records import Prompt, Sampling


def test_a_row_that_an_engine_fails_leaves_no_episode_behind() -> None:
    asked: list[Future[Any]] = []

    def call(engine: int, method: Any, batch: Any) -> Future[Any]:
        asked.append(Future())
        return asked[-1]

    handle: Any = SimpleNamespace(ready=[0], call=call)
    calls = RowCalls(handle, SimpleNamespace(), 1, 4)  # type: ignore[arg-type]
    prompt = Prompt(7, "1+1=", np.array([3], dtype=np.int32))
    for attempt in range(2):  # the queue sends a row once more
        calls.ask_row(0, prompt, Sampling(n=2))
        until(lambda attempt=attempt: len(asked) > attempt, "the call")
        asked[attempt].set_exception(RunError("its engine broke"))
        (news,) = calls.wait(HANG_S)
        assert "its engine broke" in str(getattr(news, "error", None))
    loop = calls._episodes._loop
    assert loop is not None
    until(lambda: not asyncio.all_tasks(loop), "the end of the episodes")
    calls.close()

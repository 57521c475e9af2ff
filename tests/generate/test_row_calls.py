"""Episodes of rows whose engine fails, and answers that come late."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
from sampled_responses import IDS, response
from waiting import HANG_S, until

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.generate.output import JobProgress, OutputCounts
from slurm_rlhf.generate.rows import Answered, Gone, PendingRows, RowCalls
from slurm_rlhf.records import EngineLoad, Prompt, Sampling


def test_a_row_that_an_engine_fails_leaves_no_episode_behind() -> None:
    asked: list[Future[Any]] = []

    def call(engine: int, method: Any, batch: Any) -> Future[Any]:
        asked.append(Future())
        return asked[-1]

    handle: Any = SimpleNamespace(ready=[0], call=call)
    engines: Any = SimpleNamespace(why=lambda engine: "its node is gone")
    calls = RowCalls(handle, engines, 1, 4)
    prompt = Prompt(7, "1+1=", np.array([3], dtype=np.int32))
    for attempt in range(2):  # the queue sends a row once more
        calls.ask_row(0, prompt, Sampling(n=2))
        until(lambda attempt=attempt: len(asked) > attempt, "the call")
        asked[attempt].set_exception(RunError("its engine broke"))
        (news,) = calls.wait(HANG_S)
        assert "its engine broke" in str(getattr(news, "error", None))
    calls.ask_row(0, prompt, Sampling(n=2))
    until(lambda: len(asked) > 2, "the call")
    engines.tell("engine 0 is lost", "", 0)
    asked[2].set_exception(RunError("its node is gone"))  # no news any more
    loop = calls._episodes._loop
    assert loop is not None
    until(lambda: not asyncio.all_tasks(loop), "the end of the episodes")
    assert calls.wait(HANG_S) == [Gone(0, "its node is gone")]
    calls.close()


def test_what_a_job_says_of_itself() -> None:
    groups: Any = {engine: SimpleNamespace(node=f"n{engine}", gpus=(engine,)) for engine in (1, 0)}
    load = EngineLoad(tokens=600, responses=3, busy_s=20.0)
    job = JobProgress(10, groups, began=100.0, before=2, refused=1, loads={1: load})
    counts, line = OutputCounts(), {"sample": 0, "tokens": 175, "finish_reason": "stop", "score": 0.75}
    for row in range(4):
        counts.add({"row": row, **line})
    counts.add({"row": 4, "sample": 0, "error": "no"})
    assert (job.due(9.0), job.due(10.0), job.due(19.0), job.left_s(5, 130.0)) == (False, True, False, None)
    job.since = 110.0
    assert (job.left_s(3, 130.0), job.left_s(5, 110.0), job.left_s(5, 130.0)) == (None, None, 50.0)
    said = "5 of 10 responses (50 %), 1 of 2 engines, 30 tokens/s (1: 30), 1 errors, 0:50 left"
    assert job.line(counts, 1, 130.0) == said
    names = ("engine", "node", "gpus", "tokens", "responses", "tokens_per_s", "lost")
    engines = [(0, "n0", [0], 0, 0, 0.0, "its node is gone"), (1, "n1", [1], 600, 3, 30.0, "")]
    assert job.summary("running", counts, {0: "its node is gone"}, 130.0, more=1) == {
        **{"status": "running", "responses": 5, "total_responses": 10, "before": 2, "errors": 1, "tokens": 700},
        **{"finish_reasons": {"stop": 4}, "score": 0.75, "wall_s": 30.0, "tokens_per_s": 30.0, "more": 1},
        "engines": [dict(zip(names, engine, strict=True)) for engine in engines],
    }


def test_the_first_answer_of_a_row_is_written_and_a_late_one_is_not() -> None:
    """An engine that stood still answers a row that another one has taken since."""
    calls = SimpleNamespace()
    prompts = [Prompt(row, "1+1=", IDS) for row in range(2)]
    rows = PendingRows(Config(), prompts, {0: Sampling()}, lambda _, found: [(1.0, None)] * len(found), set())
    assert (rows.queue.take(0, 0.0), rows.queue.take(1, 0.0)) == (0, 1)
    assert rows.queue.finish(1, 1, 1.0)
    assert rows.queue.take(1, 1e6) == 0
    said = [Answered(engine, 0, [response(0, "2")], EngineLoad()) for engine in (1, 0)]
    lines = [rows.take(calls, [one], JobProgress(1, {}, 0.0)) for one in said]  # type: ignore[arg-type]
    assert [[line.response for line in found] for found in lines] == [["2"], []]

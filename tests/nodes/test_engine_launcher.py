"""Engines of one node, each a process of its own, and what is believed of how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from slurm_rlhf.nodes import agent
from slurm_rlhf.nodes.agent import EngineRanks
from slurm_rlhf.nodes.launcher import EngineEnds
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.wire import timeouts


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineRanks]:
    """The two engines of this node, of two ranks each, whose processes sleep."""
    monkeypatch.setattr(agent, "start_child", lambda *_, **__: subprocess.Popen(["sleep", "60"]))
    ranks = place(Topology.uniform(("here", "there"), 4), [RoleSize("rollout", 2, tp=2, engines=4)])
    made = EngineRanks(tmp_path, ranks, "here", [], {})
    made.start()
    yield made
    made.kill()


def test_what_is_ended_is_no_news_and_what_dies_is(engines: EngineRanks) -> None:
    assert [engines.has(number) for number in range(3)] == [True, True, False]
    engines.end(1)
    news = until(engines.ended, "the end of an engine")
    assert [engine for engine, how in news if "SIGKILL" in how] == [1]
    engines.end(0, "was ended")
    until(lambda: not engines.running, "the end of all")
    assert not engines.has(0)
    assert not engines.has(1)
    assert engines.ended() == []


def test_of_ranks_that_are_gone_the_one_that_was_killed_is_named(engines: EngineRanks) -> None:
    """Its peers end by themselves when it is gone, and may be seen to have ended first."""
    *others, last = engines._engines[1].ranks
    for process, number in ((last, signal.SIGKILL), *((other, signal.SIGTERM) for other in others)):
        os.kill(process.pid, number)
        process.wait()
    for other in others:
        other.returncode = 1
    [(engine, how)] = engines.ended()
    assert (engine, how.partition(" (pid ")[2]) == (1, f"{last.pid}) was killed by SIGKILL")


def test_how_an_engine_ended_its_launcher_knows_better_than_the_rank_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, gone, killed = EngineEnds(), "its rank 1 died: process 7 is gone", "rank 1 (pid 7) was killed by SIGKILL"
    ends.said(0, gone)
    assert ends.news([]) == []
    assert ends.news([(0, killed), (1, killed)]) == [(0, killed), (1, killed)]
    ends.said(0, "its ranks did not do the same")  # then it ends by itself
    assert ends.news([(0, "rank 0 (pid 6) ended with status 1")]) == [(0, "its ranks did not do the same")]
    monkeypatch.setattr(timeouts, "ENGINE_END_S", -1.0)
    ends.said(0, gone)  # and its node says nothing
    assert ends.news([]) == [(0, gone)]
    assert ends.news([]) == []

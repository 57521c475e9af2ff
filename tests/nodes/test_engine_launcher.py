"""Engines of one machine, each a process of its own, while another thread looks for those that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from slurm_rlhf.nodes import children
from slurm_rlhf.nodes.engine_launcher import EngineEnds, LocalEngines
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.wire import timeouts


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalEngines:
    """Two engines of two ranks, whose processes sleep; starting one takes its time."""

    def start_child(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        time.sleep(0.1)
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr(children, "start_child", start_child)
    return LocalEngines(tmp_path, place(Topology.uniform(("here",), 4), [RoleSize("rollout", 1, 4, engines=2)]))


def test_who_looks_for_ends_while_they_start_finds_none(engines: LocalEngines) -> None:
    """Trainers that start again start engines again, too, that do not answer: the run is watched meanwhile."""
    starting = threading.Thread(target=engines.start, args=([], {"here": {}}))
    starting.start()
    try:
        while starting.is_alive():
            assert engines.ended() == []
    finally:
        starting.join()
        engines.stop(False, 0.0)


def test_what_is_stopped_is_no_news_and_what_dies_is(engines: LocalEngines) -> None:
    engines.start([], {"here": {}})
    try:
        assert engines._engines is not None
        engines._engines.kill_engine(1)
        news = until(engines.ended, "the end of an engine")
        assert [engine for engine, how in news if "SIGKILL" in how] == [1]
    finally:
        engines.stop(False, 0.0)
    assert engines.gone(0)
    assert engines.ended() == []


def test_of_ranks_that_are_gone_the_one_that_was_killed_is_named(engines: LocalEngines) -> None:
    """Its peers end by themselves when it is gone, and may be seen to have ended first."""
    engines.start([], {"here": {}})
    try:
        assert engines._engines is not None
        *others, last = engines._engines._engines[1].ranks
        for process, number in ((last, signal.SIGKILL), *((other, signal.SIGTERM) for other in others)):
            os.kill(process.pid, number)
            process.wait()
        for other in others:
            other.returncode = 1
        [(engine, how)] = engines.ended()
        assert (engine, how.partition(" (pid ")[2]) == (1, f"{last.pid}) was killed by SIGKILL")
    finally:
        engines.stop(False, 0.0)


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

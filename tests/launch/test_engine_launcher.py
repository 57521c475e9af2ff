"""Engines of one machine, each a process of its own, while another thread looks for those that ended."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from slurm_rlhf.launch import engine_node
from slurm_rlhf.launch.engine_launcher import LocalEngines
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.role_sizes import RoleSize
from slurm_rlhf.placement.topology import Topology


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalEngines:
    """Two engines of two ranks, whose processes sleep; starting one takes its time."""

    def start_child(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        time.sleep(0.1)
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr(engine_node, "start_child", start_child)
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

"""A stage that is asked to stop: it waits for ranks that have something to save, and for no others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.cluster.stop import STOP_FILE, Stop, StopRequested
from slurm_rlhf.config.load import load_config
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import Node, Topology
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.stages.launch import StageJob

RANKS = RankMap(Topology((Node("a", 0, 1), Node("b", 0, 1))), {"actor": [NodeShare("a", (0,), (0,))]})


class Ranks:
    """Stand for the launcher of ranks that end when they have saved; while one is missing they wait for it."""

    fixed = False

    def __init__(self, directory: Path, complete: bool) -> None:
        self.directory, self.complete = directory, complete
        self.done: bool | None = None

    def start(self, *_: Any) -> None:
        if self.complete:
            (self.directory / "metrics.jsonl").write_text('{"step": 1}\n')
        os.kill(os.getpid(), signal.SIGUSR1)

    def ended(self) -> list[Ended]:
        over = self.complete and (self.directory / STOP_FILE).exists()
        return [Ended("actor", "a", "ended", self.directory)] if over else []

    def stop(self, done: bool, grace_s: float) -> None:
        self.done = done


@pytest.mark.timeout(60)
@pytest.mark.parametrize("complete", [True, False])
def test_ranks_that_wait_for_one_on_a_lost_node_are_ended_at_once(tmp_path: Path, complete: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    config = load_config(None, [f"--sft.output_dir={tmp_path / 'out'}", f"--actor.model_name_or_path={tmp_path}"])
    ranks = Ranks(tmp_path, complete)
    job = StageJob(config, "sft", RunDirectory(tmp_path), RANKS, ranks)  # type: ignore[arg-type]
    with Stop(tmp_path) as stop, pytest.raises(StopRequested):
        job.work(stop)
    assert ranks.done is complete

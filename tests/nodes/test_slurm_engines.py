"""Engines of a Slurm job, each started again by a step of its own, against a `srun` of the test's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.nodes.engine_node import end_file, ended_file
from slurm_rlhf.nodes.slurm_engines import SlurmEngines
from slurm_rlhf.nodes.slurm_run import SlurmRun
from slurm_rlhf.nodes.step_spec import StepSpec
from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.topology import RoleSize, Topology

pytestmark = [pytest.mark.slow]
NODES = ("127.0.0.1", "127.0.0.2")
SPARE = "127.0.0.3"
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": ",".join((*NODES, SPARE)),
    "SLURM_JOB_NUM_NODES": "3",
    "SLURMD_NODENAME": NODES[0],
}
RUN = "7.0.run"


class Bench:
    def __init__(self, root: Path) -> None:
        self.root, self.run_dir = root, root / "run"
        (self.run_dir / "logs").mkdir(parents=True)
        (self.run_dir / ".control").mkdir()
        ranks = place(Topology.uniform(NODES, 2), [RoleSize("rollout", 2, 2, engines=4)])
        slurm = read_slurm(JOB)
        assert slurm is not None
        self.engines = SlurmEngines(SlurmRun(self.run_dir, slurm, token="run"), ranks)

    def srun(self, script: str) -> None:
        program = self.root / "bin" / "srun"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\necho $* >>{self.root}/starts\n{script}\n")
        program.chmod(0o755)

    @property
    def starts(self) -> list[str]:
        file = self.root / "starts"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for_starts(self, count: int) -> None:
        until(lambda: len(self.starts) >= count, f"start {count}")

    def news(self) -> list[tuple[int, str]]:
        return until(self.engines.ended, "news of an engine")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    made = Bench(tmp_path)
    yield made
    made.engines.stop(False, 0)


def test_an_engine_that_ended_starts_again_on_a_spare_node_and_no_other_does(bench: Bench) -> None:
    bench.srun("exec sleep 60")
    bench.engines.start(["--x"], {node: {"A": node} for node in NODES})
    bench.wait_for_starts(1)
    assert f"--nodelist={','.join(NODES)}" in bench.starts[0]
    assert bench.engines.ended() == []
    assert bench.engines.spares == [SPARE]
    ended_file(bench.run_dir, RUN, 1).write_text("rank 1 was killed")
    ended_file(bench.run_dir, RUN, 2).write_text("rank 2 was killed")
    assert bench.engines.gone(1)
    assert bench.engines.ended() == [(1, "rank 1 was killed"), (2, "rank 2 was killed")]  # `gone` has dropped none
    assert bench.engines.ended() == []
    bench.engines.end(1)
    assert not end_file(bench.run_dir, RUN, 1).exists()  # nothing is left of it
    bench.engines.start_again(1, SPARE)
    bench.wait_for_starts(2)
    assert f"--nodelist={SPARE}" in bench.starts[1]
    spec = StepSpec.read(bench.run_dir / ".control" / "rollout.engine1.json")
    assert (spec.run_id, spec.engines, spec.environment[SPARE]) == (f"{RUN}.e1.1", [1], {"A": NODES[0]})
    ranks = RankMap.from_json(json.loads((bench.run_dir / "rank_map.json").read_text()))
    assert {group.engine: group.node for group in ranks.tp_groups} == {
        0: NODES[0],
        1: SPARE,
        **dict.fromkeys((2, 3), NODES[1]),
    }
    assert bench.engines.spares == []
    assert not bench.engines.gone(1)


def test_an_engine_that_is_to_end_is_told_through_a_file_and_its_end_is_no_news(bench: Bench) -> None:
    bench.srun("exec sleep 60")
    bench.engines.start([], {node: {} for node in NODES})
    bench.engines.end(3)
    assert end_file(bench.run_dir, RUN, 3).exists()
    assert not bench.engines.gone(3)
    ended_file(bench.run_dir, RUN, 3).write_text("rank 3 was killed")
    assert bench.engines.gone(3)
    assert bench.engines.ended() == []


def test_a_look_that_the_file_system_does_not_answer_is_repeated(bench: Bench) -> None:
    """A directory in place of the file cannot be read either."""
    bench.srun("exec sleep 60")
    bench.engines.start([], {node: {} for node in NODES})
    ended_file(bench.run_dir, RUN, 0).mkdir()
    assert bench.engines.ended() == []
    ended_file(bench.run_dir, RUN, 0).rmdir()
    ended_file(bench.run_dir, RUN, 0).write_text("rank 0 was killed")
    assert bench.engines.ended() == [(0, "rank 0 was killed")]


def test_a_task_that_is_gone_costs_the_engines_of_its_node_alone(bench: Bench) -> None:
    bench.srun(f"echo 'srun: error: {NODES[1]}: task 1: Killed'; exec sleep 60")
    bench.engines.start([], {node: {} for node in NODES})
    found = bench.news()
    assert [engine for engine, _ in found] == [2, 3]
    assert "ended: Killed" in found[0][1]


def test_a_controller_that_is_away_costs_another_attempt(bench: Bench) -> None:
    bench.srun(
        f"[ $(wc -l <{bench.root}/starts) = 3 ] && exec sleep 60\n"
        "echo 'srun: error: Unable to contact slurm controller (connect failure)'; exit 1"
    )
    bench.engines.start([], {node: {} for node in NODES})
    until(lambda: bench.engines.ended() or len(bench.starts) >= 3, "the third start")
    assert bench.engines.ended() == []

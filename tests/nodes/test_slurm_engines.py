"""Engines of a Slurm job, each started again by a step of its own, against a `srun` of the test's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from played_agents import PlayedAgent, PlayedSrun, allocation
from waiting import until

from slurm_rlhf.nodes.agent_launcher import AgentEngines
from slurm_rlhf.nodes.agent_steps import AgentSteps
from slurm_rlhf.nodes.facts import StepSpec
from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.topology import RoleSize, Topology

NODES = ("127.0.0.1", "127.0.0.2")
SPARE = "127.0.0.3"


class Bench(PlayedSrun):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        ranks = place(Topology.uniform(NODES, 2), [RoleSize("rollout", 2, 2, engines=4)])
        self.agents = AgentSteps(self.run_dir, allocation(*NODES, SPARE), Topology.uniform((*NODES, SPARE), 2))
        spec = StepSpec(
            "rollout", str(self.run_dir), self.agents.run_id, ["--x"], {node: {"A": node} for node in NODES}
        )
        self.engines = AgentEngines(self.agents, ranks, {}, spec)

    def wait_for_starts(self, count: int) -> None:
        until(lambda: len(self.starts) >= count, f"start {count}")

    def play(self, start: int, *nodes: str) -> list[PlayedAgent]:
        """The agents of a start of a step, the last so far."""
        self.wait_for_starts(start)
        return [self.agent(node) for node in nodes]

    def news(self) -> list[tuple[int, str]]:
        return until(self.engines.ended, "news of an engine")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    made = Bench(tmp_path)
    yield made
    made.agents.end(made.engines.forget())
    made.agents.close()


def test_an_engine_that_ended_starts_again_on_a_spare_node_and_no_other_does(bench: Bench) -> None:
    bench.srun("exec sleep 60")
    bench.engines.start()
    one, other = bench.play(1, *NODES)
    assert f"--nodelist={','.join(NODES)}" in bench.starts[0]
    assert (one.started()["engines"], other.started()["environment"]) == (None, {NODES[1]: {"A": NODES[1]}})
    assert bench.engines.ended() == []
    assert bench.engines.spares == [SPARE]
    one.ended("rank 1 was killed", 1)
    other.ended("rank 2 was killed", 2)
    until(lambda: bench.engines.gone(1) and bench.engines.gone(2), "the ends")
    assert bench.engines.ended() == [(1, "rank 1 was killed"), (2, "rank 2 was killed")]  # `gone` has dropped none
    assert bench.engines.ended() == []
    bench.engines.start_again(1, SPARE)
    (moved,) = bench.play(2, SPARE)
    assert f"--nodelist={SPARE}" in bench.starts[1]
    spec = moved.started()
    assert (spec["engines"], spec["environment"][SPARE]) == ([1], {"A": NODES[0]})
    ranks = RankMap.from_json(json.loads((bench.run_dir / "rank_map.json").read_text()))
    assert {group.engine: group.node for group in ranks.tp_groups} == {
        0: NODES[0],
        1: SPARE,
        **dict.fromkeys((2, 3), NODES[1]),
    }
    assert bench.engines.spares == []
    one.ended("was ended", 1)  # a late event of its old node is no news
    moved.ended("rank 1 was killed again", 1)
    assert bench.news() == [(1, "rank 1 was killed again")]


def test_an_engine_that_stays_on_its_node_needs_no_step(bench: Bench) -> None:
    """Such an engine needs no slurmctld, which may be away. Its agent reports its end."""
    bench.srun("exec sleep 60")
    bench.engines.start()
    (other,) = bench.play(1, NODES[1])
    other.started()
    bench.engines.end(3)
    assert other.asked("end")[1] == 3
    assert not bench.engines.gone(3)
    other.ended("rank 3 was killed", 3)
    until(lambda: bench.engines.gone(3), "the end")
    assert bench.engines.ended() == []  # an end by order is no news
    bench.engines.start_again(3, NODES[1])
    assert other.started()["engines"] == [3]
    assert not bench.engines.gone(3)
    assert len(bench.starts) == 1


def test_engines_whose_srun_was_killed_start_again_in_steps_of_their_own(bench: Bench) -> None:
    """The agents of that srun may be heard for a moment more: an engine that they start would be lost at once."""
    bench.srun(f"echo $$ >{bench.root}/pid; exec sleep 60")
    bench.engines.start()
    for agent in bench.play(1, *NODES):
        agent.started()
    os.kill(int((bench.root / "pid").read_text()), signal.SIGKILL)
    found: dict[int, str] = {}
    until(lambda: found.update(bench.engines.ended()) or len(found) == 4, "the end of all engines")
    assert all("srun was killed by SIGKILL" in how for how in found.values())
    bench.engines.start_again(3, NODES[1])
    bench.wait_for_starts(2)
    assert not bench.engines.gone(3)
    assert bench.engines.ended() == []


def test_a_task_that_is_gone_costs_the_engines_of_its_node_alone(bench: Bench) -> None:
    bench.srun(f"echo 'srun: error: {NODES[1]}: task 1: Killed'; exec sleep 60")
    bench.engines.start()
    found = bench.news()
    assert [engine for engine, _ in found] == [2, 3]
    assert "ended: Killed" in found[0][1]


def test_a_controller_that_is_away_costs_another_attempt(bench: Bench) -> None:
    bench.srun(
        "[ $(wc -l <$logs/starts) = 3 ] && exec sleep 60\n"
        "echo 'srun: error: Unable to contact slurm controller (connect failure)'; exit 1"
    )
    bench.engines.start()
    until(lambda: bench.engines.ended() or len(bench.starts) >= 3, "the third start")
    assert bench.engines.ended() == []

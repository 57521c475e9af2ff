"""The launcher against a `srun` of the test's own: what it believes, what it starts again, how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from played_agents import PlayedAgent, PlayedSrun, allocation
from waiting import HANG_S, until

from slurm_rlhf.nodes.agent_launcher import AgentLauncher
from slurm_rlhf.nodes.agent_steps import AgentStep, AgentSteps
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.node_look import look
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology

NODES = ("127.0.0.1", "127.0.0.2")


class Bench(PlayedSrun):
    """A launcher with actor on both nodes and reference on both."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        sizes = [RoleSize("actor", 2, 2), RoleSize("reference", 2, 2)]
        topology = Topology.uniform(NODES, 8)
        self.steps = AgentSteps(self.run_dir, allocation(*NODES), topology)
        self.launcher = AgentLauncher(self.steps, place(topology, sizes), {})

    def start(self, role: str) -> None:
        self.launcher.start(role, [], {node: {} for node in NODES})

    def news(self) -> list[Ended]:
        return until(self.launcher.ended, "news of a step")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    bench = Bench(tmp_path)
    yield bench
    bench.launcher.stop(False, 0)
    bench.steps.close()


def test_a_step_that_returns_0_before_anybody_said_done_has_ended(bench: Bench) -> None:
    bench.srun("exit 0")
    bench.start("reference")
    (ended,) = bench.news()
    assert (ended.role, ended.how) == ("reference", "ended (srun ended with status 0)")
    assert bench.launcher.ended() == []  # reported once


def test_the_first_task_that_failed_is_named_while_srun_still_waits_for_the_others(bench: Bench) -> None:
    bench.srun(
        "echo 'srun: error: gpu002: task 1: Exited with exit code 1'; "
        "echo 'srun: error: gpu[001,003]: tasks 0,2: Killed'; exec sleep 60"
    )
    bench.start("reference")
    first, second = bench.news()
    assert (first.node, first.how) == ("gpu002", "ended: Exited with exit code 1")
    assert (second.node, second.how) == ("gpu[001,003]", "ended: Killed")
    assert first.log.name == "reference.srun.log"
    assert bench.launcher.ended() == []


def test_torchruns_of_other_nodes_start_when_that_of_the_first_listens(bench: Bench) -> None:
    """How one ends is known from its agent; what srun says of that afterwards is no news."""
    killed = f"srun: error: {NODES[1]}: task 1: Killed"
    bench.srun(f"while [[ ! -e $logs/killed ]]; do sleep 0.1; done; echo '{killed}'; exec sleep 60")
    bench.start("actor")
    until(lambda: bench.starts, "the step")
    other, first = bench.agent(NODES[1]), bench.agent(NODES[0])
    assert (spec := first.started("10.0.0.1:24001"))["environment"] == {NODES[0]: {}}
    assert spec["store"] == ""
    assert other.started()["store"] == "10.0.0.1:24001"
    assert bench.launcher.ended() == []
    other.ended("was killed by SIGKILL")
    (ended,) = bench.news()
    assert (ended.role, ended.node, ended.how) == ("actor", NODES[1], "was killed by SIGKILL")
    (bench.run_dir / "logs" / "killed").touch()
    until(lambda: "Killed" in (bench.run_dir / "logs" / "actor.srun.log").read_text(), "the words of srun")
    assert bench.launcher.ended() == []


def test_a_controller_that_restarts_costs_another_attempt_with_agents_of_its_own(bench: Bench) -> None:
    bench.srun(
        "[ $(wc -l <$logs/starts) = 3 ] && exec sleep 60\n"
        "echo 'srun: error: Unable to contact slurm controller (connect failure)'; sleep 0.3; exit 1"
    )
    bench.start("actor")
    until(lambda: bench.starts, "the step")
    early = bench.agent(NODES[0])
    said = []
    until(lambda: said.extend(bench.launcher.ended()) or len(bench.starts) == 3, "the third attempt")
    early.ended("was killed by SIGKILL")
    assert bench.agent(NODES[0]).step != early.step
    assert said + bench.launcher.ended() == []


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_controller_that_stays_away_ends_the_run(
    bench: Bench, meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each srun ends just after it was looked at."""
    bench.srun("echo 'srun: error: Unable to contact slurm controller'; exit 1")
    look = bench.steps.retry

    def looked_at(step: AgentStep, stopping: bool) -> bool:
        again = look(step, stopping)
        if not again:
            until(lambda: step.running.code is not None, "the end of srun")
        return again

    if meanwhile:
        monkeypatch.setattr(bench.steps, "retry", looked_at)
    bench.start("actor")
    (ended,) = bench.news()
    assert ended.role == "actor"
    assert len(bench.starts) == 5


def test_what_an_earlier_run_wrote_into_the_logs_is_no_news(bench: Bench) -> None:
    for name in ("actor.srun.log", f"actor.{NODES[0]}.torchrun.log"):
        (bench.run_dir / "logs" / name).write_text(
            "srun: error: gpu9: task 0: Killed\nUnable to contact slurm controller\n"
        )
    bench.srun("exec sleep 60")
    bench.start("actor")
    until(lambda: bench.starts, "the step")
    assert bench.launcher.ended() == []
    assert len(bench.starts) == 1


@pytest.mark.slow
def test_stop_waits_for_ranks_that_are_done_and_is_hard_on_the_others(bench: Bench) -> None:
    bench.srun("trap 'echo ended by TERM; exit 0' TERM; sleep 0.7 & wait; echo went by itself")
    bench.start("reference")
    bench.launcher.stop(True, 5)
    log = bench.run_dir / "logs" / "reference.srun.log"
    assert log.read_text() == "went by itself\n"

    bench.srun(f"trap '' TERM; exec sleep {2 * HANG_S}")
    bench.start("actor")
    while len(bench.starts) < 2:
        time.sleep(0.05)
    bench.launcher.stop(False, 5)
    assert bench.launcher.ended()[-1].role == "actor"


@pytest.fixture
def residents(bench: Bench) -> list[PlayedAgent]:
    """The agents of the step over all nodes."""
    bench.srun(f"while [[ ! -e $logs/end ]]; do sleep 0.1; done; exec sleep {HANG_S}")
    bench.steps.begin(bench.steps.orders())
    until(lambda: bench.starts, "the step")
    found = [bench.agent(node) for node in NODES]
    until(lambda: len(bench.steps.residents) == len(NODES), "its agents")
    return found


@pytest.mark.slow
def test_each_node_looks_at_its_own_processes(bench: Bench, residents: list[PlayedAgent]) -> None:
    pids = {NODES[0]: [1], NODES[1]: [2, 3]}
    with ThreadPoolExecutor() as pool:
        views = pool.submit(bench.launcher.agents.look, pids, HANG_S)
        for agent, node in zip(residents, NODES, strict=True):
            request, asked = agent.asked("look")
            assert asked == pids[node]
            request.reply(look(node, [os.getpid(), 2**22 + 1]))
    one, other = sorted(views.result(), key=lambda view: view.node)
    assert one.states[os.getpid()][0] in "RS"
    assert one.load.startswith("load ")
    assert (other.node, other.states[2**22 + 1]) == (NODES[1], "")  # no such process


@pytest.mark.slow
def test_nodes_that_do_not_answer_are_not_waited_for(bench: Bench, residents: list[PlayedAgent]) -> None:
    assert bench.launcher.agents.look({node: [1] for node in (*NODES, "n9")}, 1.0) == []


@pytest.mark.slow
def test_a_node_is_heard_while_one_of_its_agents_is(bench: Bench, residents: list[PlayedAgent]) -> None:
    (step,) = bench.starts
    assert "--job-name=nodes" in step
    assert "--no-kill" in step
    assert f"--nodelist={','.join(NODES)}" in step
    assert bench.launcher.agents.unheard(HANG_S) == set()
    residents[1].client.close()
    until(lambda: bench.launcher.agents.unheard(HANG_S) == {NODES[1]}, "its goodbye")
    bench.start("actor")
    until(lambda: len(bench.starts) == 2, "the step of a role")
    bench.agent(NODES[1])
    until(lambda: bench.launcher.agents.unheard(HANG_S) == set(), "another agent of that node")

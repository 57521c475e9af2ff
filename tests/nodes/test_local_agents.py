"""The agent of one machine, a child of this process, which starts roles and engines and tells how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from waiting import until

from slurm_rlhf.cluster.processes import running
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.nodes.agent_launcher import AgentLauncher
from slurm_rlhf.nodes.agent_steps import LocalAgents
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology

pytestmark = pytest.mark.slow
HERE = node_name()
RANKS = place(Topology.uniform([HERE], 2), [RoleSize("actor", 1, 1), RoleSize("rollout", 1, engines=1)])
ENVIRONMENT = {HERE: {"NUMBER": "5"}}


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[LocalAgents]:
    with closing(LocalAgents(tmp_path, RANKS.topology)) as made:
        made.begin(made.orders())
        yield made
    assert made.over()


@pytest.fixture
def launcher(agents: LocalAgents) -> Iterator[AgentLauncher]:
    made = AgentLauncher(agents, RANKS, {})
    yield made
    made.stop(False, 0.0)


def engine_ends(launcher: AgentLauncher) -> list[tuple[int, str]]:
    return until(launcher.engines.ended, "the end of the engine")


def test_an_engine_that_ends_is_reported_and_starts_again_though_its_agent_was_killed(
    agents: LocalAgents, launcher: AgentLauncher
) -> None:
    launcher.start("rollout", ["--no_such_argument"], ENVIRONMENT)
    assert launcher.engines.spares == []
    [(engine, how)] = engine_ends(launcher)
    assert (engine, how.partition(" (pid ")[0]) == (0, f"rank 0 of engine 0 on {HERE}")
    assert how.endswith("ended with status 2")
    launcher.engines.start_again(0, HERE)
    assert [engine for engine, _ in engine_ends(launcher)] == [0]
    killed = agents.residents[HERE].pid
    os.kill(killed, signal.SIGKILL)
    until(agents.over, "the end of the agent")
    launcher.engines.start_again(0, HERE)
    assert [engine for engine, _ in engine_ends(launcher)] == [0]
    assert agents.residents[HERE].pid != killed


def torchrun(agents: LocalAgents, launcher: AgentLauncher) -> psutil.Process:
    launcher.start("actor", [], ENVIRONMENT)
    agent = psutil.Process(until(lambda: agents.residents, "the agent")[HERE].pid)
    made = until(agent.children, "the torchrun")[0]
    until(lambda: made.cmdline() != agent.cmdline(), "its program")  # a fork that is stopped stops its agent, too
    return made


def test_a_role_that_was_ended_on_purpose_is_no_news_and_one_whose_torchrun_dies_is(
    agents: LocalAgents, launcher: AgentLauncher
) -> None:
    launcher.start("rollout", ["--no_such_argument"], ENVIRONMENT)
    engine_ends(launcher)
    first = torchrun(agents, launcher)
    launcher.end(["actor"], RANKS)
    assert launcher.engines is not None  # they may start again
    assert not running(first.pid)
    assert launcher.ended() == []
    torchrun(agents, launcher).kill()
    [end] = until(launcher.ended, "the end of the torchrun")
    assert (end.role, end.node, end.how) == ("actor", HERE, "was killed by SIGKILL")


def test_a_torchrun_that_a_signal_has_stopped_goes_on(
    agents: LocalAgents, launcher: AgentLauncher, tmp_path: Path
) -> None:
    """It has the store of its ranks, which wait for it without a limit while they start."""
    stopped = torchrun(agents, launcher)
    stopped.suspend()
    said = "a signal has stopped the process of actor: SIGCONT lets it go on"
    until(lambda: any(said in log.read_text() for log in (tmp_path / "logs").glob("*.log")), "the agent's words")
    until(lambda: stopped.status() != psutil.STATUS_STOPPED, "its continuation")
    assert launcher.ended() == []

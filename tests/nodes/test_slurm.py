"""The launcher against a `srun` of the test's own: what it believes, what it starts again, how it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from played_agents import WRITE_ORDERS, PlayedAgent
from waiting import HANG_S, until

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.node_look import NodeView, look
from slurm_rlhf.nodes.slurm import SlurmLauncher
from slurm_rlhf.nodes.slurm_run import SlurmRun
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology

pytestmark = [pytest.mark.slow]
NODES = ("127.0.0.1", "127.0.0.2")
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": ",".join(NODES),
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": NODES[0],
}


def allocation() -> SlurmEnvironment:
    found = read_slurm(JOB)
    assert found is not None
    return found


class Bench:
    """A launcher with actor on both nodes and reference on both; `srun` is a shell script."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_dir = root / "run"
        (self.run_dir / "logs").mkdir(parents=True)
        (self.run_dir / ".control").mkdir()
        sizes = [RoleSize("actor", 2, 2), RoleSize("reference", 2, 2)]
        ranks = place(Topology.uniform(NODES, 8), sizes)
        self.launcher = SlurmLauncher(SlurmRun(self.run_dir, allocation()), ranks)

    def srun(self, script: str) -> None:
        program = self.root / "bin" / "srun"
        program.parent.mkdir(exist_ok=True)
        begin = f"#!/bin/bash\nlogs={self.run_dir}/logs\norders=$logs/orders\n{WRITE_ORDERS}"
        program.write_text(f"{begin}echo start >>$logs/starts\n{script}\n")
        program.chmod(0o755)

    def start(self, role: str) -> None:
        self.launcher.start(role, [], {node: {} for node in NODES})

    def news(self) -> list[Ended]:
        return until(self.launcher.ended, "news of a step")

    @property
    def starts(self) -> int:
        file = self.run_dir / "logs" / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def agent(self, node: str) -> PlayedAgent:
        """The agent of a node in the step that was started last."""
        return PlayedAgent(self.run_dir / "logs" / "orders", node)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    bench = Bench(tmp_path)
    yield bench
    bench.launcher.stop(False, 0)


def test_a_step_that_returns_0_before_anybody_said_done_has_ended(bench: Bench) -> None:
    bench.srun("exit 0")
    bench.start("reference")
    (ended,) = bench.news()
    assert (ended.role, ended.how) == ("reference", "ended (srun ended with status 0)")
    assert bench.launcher.ended() == []  # told once


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
        "echo 'srun: error: Unable to contact slurm controller (connect failure)'\n"
        "echo 'srun: error: n1: task 0: Exited with exit code 1'; sleep 0.3; exit 1"
    )
    bench.start("actor")
    until(lambda: bench.starts, "the step")
    early = bench.agent(NODES[0])
    said = []
    until(lambda: said.extend(bench.launcher.ended()) or bench.starts == 3, "the third attempt")
    early.ended("was killed by SIGKILL")
    assert bench.agent(NODES[0]).step != early.step
    assert said + bench.launcher.ended() == []


def test_a_controller_that_stays_away_ends_the_run(bench: Bench) -> None:
    bench.srun("echo 'srun: error: Unable to contact slurm controller'; exit 1")
    bench.start("actor")
    (ended,) = bench.news()
    assert ended.role == "actor"
    assert bench.starts == 5


def test_what_an_earlier_run_wrote_into_the_logs_is_no_news(bench: Bench) -> None:
    for name in ("actor.srun.log", f"actor.{NODES[0]}.torchrun.log"):
        (bench.run_dir / "logs" / name).write_text(
            "srun: error: gpu9: task 0: Killed\nUnable to contact slurm controller\n"
        )
    bench.srun("exec sleep 60")
    bench.start("actor")
    until(lambda: bench.starts, "the step")
    assert bench.launcher.ended() == []
    assert bench.starts == 1


def test_stop_waits_for_ranks_that_are_done_and_is_hard_on_the_others(bench: Bench) -> None:
    bench.srun("trap 'echo ended by TERM; exit 0' TERM; sleep 0.7 & wait; echo went by itself")
    bench.start("reference")
    bench.launcher.stop(True, 5)
    log = bench.run_dir / "logs" / "reference.srun.log"
    assert log.read_text() == "went by itself\n"

    bench.srun(f"trap '' TERM; exec sleep {2 * HANG_S}")
    bench.start("actor")
    while bench.starts < 2:
        time.sleep(0.05)
    bench.launcher.stop(False, 5)
    assert bench.launcher.ended()[-1].role == "actor"


def test_each_node_looks_at_its_own_processes(bench: Bench, tmp_path: Path) -> None:
    bench.srun("exec sleep 60")
    bench.start("reference")
    until(lambda: bench.starts, "the step")
    agents = [bench.agent(node) for node in NODES]
    agents[0].started("10.0.0.1:24001")
    agents[1].started()
    looking = threading.Thread(target=bench.launcher.look, args=({NODES[0]: [1], NODES[1]: [2, 3]}, tmp_path, HANG_S))
    looking.start()
    for agent, node, pids in zip(agents, NODES, ([1], [2, 3]), strict=True):
        request, asked = agent.asked("look")
        assert asked == pids
        request.reply(look(node, [os.getpid(), 2**22 + 1]))
    looking.join()
    one, other = (NodeView.read(tmp_path / f"{node}.json") for node in NODES)
    assert one.processes[0].state[0] in "RS"
    assert one.load.startswith("load ")
    assert (other.node, other.processes[1].state) == (NODES[1], "")  # no such process
    assert one.processes[0].spy or one.processes[0].no_spy


def test_nodes_that_do_not_answer_are_not_waited_for(bench: Bench, tmp_path: Path) -> None:
    bench.srun("exec sleep 60")
    bench.start("reference")
    until(lambda: bench.starts, "the step")
    bench.agent(NODES[0]).started("10.0.0.1:24001")
    bench.launcher.look({node: [1] for node in NODES}, tmp_path, 1.0)
    assert not list(tmp_path.glob("*.json"))


def test_nodes_where_nothing_can_be_started_are_those_that_srun_names(bench: Bench) -> None:
    """The words are those of Slurm 22.05 about a node that had crashed, and about one whose network was cut."""
    bench.srun("[[ $* == *--nodelist=127.0.0.1,127.0.0.2* && $* == *--overlap* && ${@: -1} == true ]]")
    assert bench.launcher.unreached(NODES) == []
    failed = f"Task launch for StepId=1.0 failed on node {NODES[1]}: Communication connection failure"
    bench.srun(f"echo 'srun: error: {failed}'; echo 'srun: error: Application launch failed'; exit 1")
    assert bench.launcher.unreached(NODES) == [NODES[1]]
    bench.srun("exit 0")
    assert bench.launcher.unreached(NODES) == []  # what was said the last time is no news

"""A job that has lost its first node: who is left, what is done, and that it is done once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from programs import write_program
from waiting import HANG_S, until

from slurm_rlhf.cluster.network import unreachable
from slurm_rlhf.cluster.processes import CONDUCTOR_GONE_STATUS
from slurm_rlhf.cluster.slurm_job import Job
from slurm_rlhf.nodes import requeue
from slurm_rlhf.nodes.agent import Agent, EngineRanks
from slurm_rlhf.nodes.facts import Orders
from slurm_rlhf.nodes.requeue import CANCEL, LEAVE, REQUEUE, WAIT, Successor, await_end, decide, mark, successors
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.wire.auth import RunKeys

ALIVE = Job("12", "12", "RUNNING", "None", "0:0", "1", "gpu[001-003]", "", "", batch_host="gpu001", requeue="1")
HEADLESS = replace(ALIVE, nodes="gpu[002-003]")
NOBODY = ("127.0.0.1", 1)
SHOWN = "JobId=12 JobState={} Requeue={} Restarts={} NodeList={} BatchHost=gpu001"


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (("n2", "n3", "n4"), ["n2", "n3"]),
        (("n1", "n4", "n2"), ["n4", "n2"]),
        (("n1",), []),
        ((), []),
    ],
)
def test_the_first_nodes_with_engines_wait(engines: tuple[str, ...], expected: list[str]) -> None:
    """Each has two engines; `n1` is the first node of the job, and all have trainers."""
    sizes = [RoleSize("actor", 4, 1)]
    ranks = place(Topology.uniform(("n1", "n2", "n3", "n4"), 4), sizes)
    if engines:
        other = place(Topology.uniform(engines, 4), [RoleSize("rollout", len(engines), 2, engines=2 * len(engines))])
        ranks = replace(ranks, roles={**ranks.roles, "rollout": other.roles["rollout"]})
    assert successors(ranks, "n1") == expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (ALIVE, WAIT),  # slurmctld does not know yet, or the conductor alone has died: its job ends by itself
        (HEADLESS, REQUEUE),
        (replace(HEADLESS, requeue="0"), CANCEL),
        (replace(HEADLESS, restarts="2"), LEAVE),  # somebody has requeued it, and it runs again
        (replace(HEADLESS, restarts="2", state="PENDING"), LEAVE),
        (replace(HEADLESS, state="COMPLETING"), LEAVE),
        (replace(HEADLESS, state="CANCELLED"), LEAVE),
        (replace(HEADLESS, state="NODE_FAIL"), LEAVE),
        (None, LEAVE),
    ],
)
def test_what_is_done(job: Job | None, expected: str) -> None:
    assert decide(job, 1, chain=False) == expected
    assert decide(job, 1, chain=True) == (CANCEL if expected == REQUEUE else expected)


def test_a_conductor_answers_where_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not unreachable(*server.getsockname())
    assert unreachable(*NOBODY)


class Slurm:
    """A `scontrol` and a `scancel` of the test's, which note that they were called."""

    def __init__(self, root: Path) -> None:
        self.bin, self.run_dir = root / "bin", root / "run"
        (self.run_dir / ".control").mkdir(parents=True)
        self.refusal = ""  # the error by which requeue is refused; empty: it is not
        self.program("scancel", "")

    def program(self, name: str, script: str) -> None:
        write_program(self.bin / name, f'#!/bin/sh\necho "{name} $@" >>{self.bin}/calls\n{script}\n')

    def says(self, state: str = "RUNNING", requeue: int = 1, restarts: int = 0, nodes: str = "gpu[002-003]") -> None:
        shown = SHOWN.format(state, requeue, restarts, nodes)
        refused = f"echo '{self.refusal}' >&2; exit 1" if self.refusal else "exit 0"
        self.program("scontrol", f"test $1 = show && echo '{shown}' && exit 0\n{refused}")

    @property
    def done(self) -> list[str]:
        """Calls so far, without those that only ask."""
        calls = (self.bin / "calls").read_text().splitlines()
        return [call for call in calls if not call.startswith("scontrol show")]

    def successor(self, node: str = "gpu002", endpoint: tuple[str, int] = NOBODY) -> Successor:
        return Successor("12", 0, "gpu001", node, self.run_dir, endpoint)


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    return made


def test_one_of_those_left_requeues_the_job_once(controller: Slurm) -> None:
    successor, second, twin = controller.successor(), controller.successor("gpu003"), controller.successor()
    controller.says(nodes="gpu[001-003]")
    assert not successor.settled()
    controller.program("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert not successor.settled()
    controller.says()
    assert not successor.settled()
    assert controller.done == ["scontrol requeue 12"]
    assert mark(controller.run_dir, "12", 0).read_text() == (
        "its first node gpu001 was down, and with it the conductor: gpu002 has requeued it\n"
    )
    assert second.settled()  # slurmctld is slow, and says the same
    assert twin.settled()  # the agent of another step on the same node
    controller.says("PENDING", restarts=1, nodes="(null)")
    assert successor.settled()
    controller.says(restarts=1)  # the job has lost its first node once more: its new start's agents deal with that
    assert successor.settled()
    assert controller.done == ["scontrol requeue 12"]


def test_the_second_acts_when_the_first_does_not(controller: Slurm) -> None:
    controller.says()
    assert not controller.successor("gpu003").settled()
    assert controller.done == ["scontrol requeue 12"]


def test_a_conductor_that_answers_is_left_alone(controller: Slurm) -> None:
    """The conductor was stopped for a while, or this node was cut off."""
    controller.says()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert controller.successor(endpoint=server.getsockname()).settled()
    assert not (controller.bin / "calls").exists()


def test_a_job_that_is_not_to_be_requeued_is_cancelled(controller: Slurm) -> None:
    controller.says(requeue=0)
    assert not controller.successor().settled()
    assert controller.done == ["scancel 12"]
    assert "gpu002 has cancelled it" in mark(controller.run_dir, "12", 0).read_text()


def test_a_job_whose_requeue_is_refused_is_cancelled_but_not_while_slurmctld_is_away(controller: Slurm) -> None:
    successor = controller.successor()
    for controller.refusal in ("Unable to contact slurm controller", "refused"):
        controller.says()
        assert not successor.settled()
    assert controller.done == [*["scontrol requeue 12"] * 2, "scancel 12"]
    assert "(scontrol requeue: refused): gpu002 has cancelled it" in mark(controller.run_dir, "12", 0).read_text()


@pytest.mark.parametrize(
    ("ends", "expected"),
    [(f"exit {CONDUCTOR_GONE_STATUS}", True), ("exit 1", False), ("exit 0", False), ("kill -9 $$", False)],
)
def test_only_ranks_that_miss_the_conductor_leave_somebody_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, expected: bool
) -> None:
    monkeypatch.setattr("slurm_rlhf.nodes.agent.start_child", lambda *_, **__: subprocess.Popen(["sh", "-c", ends]))
    ranks = place(Topology.uniform(("here",), 2), [RoleSize("rollout", 1, 2, engines=2)])
    engines = EngineRanks(tmp_path, ranks, "here", [], {})
    engines.start()
    for engine in engines._engines.values():
        for process in engine.ranks:
            process.wait()
    assert not engines.running
    assert engines.conductor_gone is expected


def test_an_agent_that_has_no_process_leaves_when_it_is_asked(tmp_path: Path) -> None:
    agent = Agent(Orders(RunKeys.create(tmp_path / "keys").text(), "127.0.0.1", 0, str(tmp_path), 1.0, 20.0), "here")
    assert not agent._over
    agent._obey(SimpleNamespace(method="leave", reply=lambda: None))  # type: ignore[arg-type]
    assert agent._over


def test_only_the_first_nodes_with_engines_wait_for_slurmctld(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = place(Topology.uniform(("n1", "n2", "n3", "n4"), 1), [RoleSize("rollout", 4, engines=4)])
    monkeypatch.setattr(requeue, "read_slurm", lambda _: SimpleNamespace(job_nodes=("n1",), job_id=1))
    spec: Any = SimpleNamespace(run_dir="/nowhere")
    await_end(spec, ranks, "n4", NOBODY)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PATH", "/nowhere")  # without scontrol
    await_end(spec, ranks, "n3", NOBODY)
    assert "n3 does not hear n1, and there is no scontrol here" in capsys.readouterr().out
    monkeypatch.setattr(requeue, "read_slurm", lambda _: None)
    await_end(spec, ranks, "n3", NOBODY)
    assert capsys.readouterr().out == ""


def test_scancel_ends_it_although_the_ranks_ignore_sigterm() -> None:
    """The remaining agent ignored SIGTERM until then, as all processes of a step do."""
    program = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from slurm_rlhf.nodes import requeue\n"
        "requeue.read_slurm = lambda _: os.kill(os.getpid(), signal.SIGTERM)\n"
        "requeue.await_end(None, None, 'n', ('', 0))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=HANG_S).returncode == -signal.SIGTERM


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from slurm_rlhf.nodes.child_process import start_child\n"
        "print(start_child(['sleep', '300'], Path(sys.argv[1]), os.environ).pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        until(lambda: child.name() == "sleep")
        parent.kill()
    try:
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()

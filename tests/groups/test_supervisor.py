"""Who is named when a run breaks: real ranks over real sockets, started by a launcher of the test's own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_peer import INTERVAL, ask, start_peer, stop_peer
from waiting import HANG_S, scaled, until

from slurm_rlhf.cluster.processes import running
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, RemoteError, RoleDied, RunError
from slurm_rlhf.groups.deaths import SILENT_BEATS
from slurm_rlhf.groups.supervisor import POLL_S, Supervisor
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.observe.log_tail import _ROOT_CAUSE
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import RankCalls
from slurm_rlhf.wire.handles import EngineHandle
from slurm_rlhf.wire.messages import TERMINATION

MARKS_OF_FIXTURES = {"processes": "slow", "supervisor": "slow"}
LIMIT = float(round(scaled(8.0)))
CONNECT = float(round(scaled(12.0)))
BROKEN = RemoteError("train_step failed on actor rank 0: RuntimeError: Connection closed by peer")

EARLIER = "STEP 7.0 CANCELLED DUE TO NODE FAILURE"  # a start before this one wrote it

STOPPED = """
import sys
sys.path[:0] = ["{tests}", "{tests}/../support"]
from test_supervisor import *

class Watched(Processes):
    def ended(self):
        codes = {{who: process.poll() for who, process in self.started.items()}}
        fresh = [who for who, code in codes.items() if code is not None and who not in self.stated]
        self.stated.update(fresh)
        log = self.directory.logs / "srun.log"
        return [Ended(role, f"n{{rank + 1}}", f"ended with status {{codes[role, rank]}}", log) for role, rank in fresh]
    stated = set()

directory = RunDirectory(Path("{path}"))
directory.make()
processes = Watched(directory)
processes.limit = LIMIT
made = make(processes)
made.start({{"actor": {{}}, "critic": {{}}}})
print(*(process.pid for process in processes.started.values()), flush=True)
while made.failure is None:
    time.sleep(0.1)
print(made.failure)
made.stop()
"""
"""A conductor in a process of its own."""


class Processes:
    """Implements `cluster.launcher.Launcher`: a rank of the actor and one of the critic on n1, another actor on n2."""

    address = "127.0.0.2"  # not that of a run on one machine alone
    engines = None
    limit = LIMIT

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.agents = self
        self.started: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self.news: list[Ended] = []
        self.absent: set[tuple[str, int]] = set()  # ranks that never come
        self.gone: set[str] = set()  # nodes that fell silent a moment ago

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        endpoint = next(word for word in arguments if word.startswith("--endpoint=")).partition("=")[2]
        world = 2 if role == "actor" else 1
        for rank in range(world):
            where = (endpoint, self.directory.keys, role, rank, world, self.limit, f"n{rank + 1}")
            if (role, rank) not in self.absent:
                self.started[role, rank] = start_peer(*where)

    def end(self, role: str, rank: int, how: str = "ended: Killed") -> None:
        """The rank ends, and is seen to."""
        self.started[role, rank].kill()
        self.news.append(Ended(role, f"n{rank + 1}", how, self.directory.logs / f"{role}.srun.log"))

    def ended(self) -> list[Ended]:
        news, self.news = self.news, []
        return news

    def unheard(self, seconds: float) -> set[str]:
        return self.gone if seconds < self.limit else set()

    def stop(self, done: bool, grace_s: float) -> None:
        for process in self.started.values():
            stop_peer(process)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    (directory.logs / "actor.srun.log").write_text(f"slurmstepd: error: *** {EARLIER} ***\n")
    return Processes(directory)


@pytest.fixture
def supervisor(processes: Processes) -> Iterator[Supervisor]:
    made = make(processes)
    made.start({"actor": {}, "critic": {}})
    try:
        yield made
    finally:
        made.stop()


def make(processes: Processes) -> Supervisor:
    config = Config()
    config.timeout.heartbeat_interval, config.timeout.heartbeat = INTERVAL, processes.limit
    config.timeout.shutdown, config.timeout.connect = 1.0, CONNECT
    ranks = place(Topology.uniform(["n1", "n2"], 2), [RoleSize("actor", 2, 1), RoleSize("critic", 1, 1)])
    return Supervisor(config, processes.directory, ranks, processes)


def blamed(supervisor: Supervisor, error: RunError) -> RunError | None:
    """The error that is raised instead, if one is."""
    try:
        supervisor.blame(error)
    except RunError as other:
        return other
    return None


def test_a_silent_rank_is_named_and_not_the_one_whose_collective_it_broke(
    supervisor: Supervisor, processes: Processes
) -> None:
    processes.started["actor", 1].kill()
    verdict = blamed(supervisor, BROKEN)
    assert isinstance(verdict, RoleDied)
    assert "role actor died: rank 1 on n2 " in str(verdict)
    assert f"is lost: it was not heard from for {LIMIT / 2:g} s" in str(verdict)
    assert str(BROKEN) in str(verdict)
    with pytest.raises(RoleDied, match="rank 1 on n2"):
        supervisor.roles["critic"].ask(0, RankCalls.shutdown).result(HANG_S)


def test_a_dead_node_is_named_and_not_the_ranks_that_ended_because_of_it(
    supervisor: Supervisor, processes: Processes
) -> None:
    processes.started["actor", 1].kill()
    processes.end("actor", 0)
    verdict = blamed(supervisor, BROKEN)
    assert "role actor died: rank 1 on n2 " in str(verdict)
    assert "and actor on n1 ended: Killed" in str(verdict)


def test_a_rank_that_ended_is_named_and_not_those_that_were_ended_with_it(
    supervisor: Supervisor, processes: Processes
) -> None:
    with (processes.directory.logs / "actor.srun.log").open("a") as log:
        log.write("srun: error: n2: task 1: Killed\n")
    processes.end("actor", 1)
    processes.end("actor", 0)
    verdict = blamed(supervisor, BROKEN)
    assert "role actor died: its process group on n2 ended: Killed" in str(verdict)
    assert "    srun: error: n2: task 1: Killed" in str(verdict)
    assert EARLIER not in str(verdict)


def test_a_rank_that_was_killed_is_named_without_a_look_for_dead_nodes(
    supervisor: Supervisor, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its torchrun has reported it. A rank on the other node ended because of it, and srun tells of that one first."""
    monkeypatch.setattr(timeouts, "VERDICT_S", 2 * HANG_S)
    report = f"{_ROOT_CAUSE}\n  rank      : 1 (local_rank: 0)\n  exitcode  : -9 (pid: 7)\n"
    processes.directory.role_log("actor", "n2", "torchrun").write_text(report)
    for rank in range(2):
        processes.end("actor", rank, "ended: Exited with exit code 1")
    until(lambda: supervisor.failure, "verdict")
    assert "role actor died: rank 1 on n2 (pid 7) was killed by SIGKILL" in str(supervisor.failure)
    assert supervisor.failed_role.nodes == ("n2",)


def test_sigterm_means_preemption_where_all_ranks_of_a_role_got_it(supervisor: Supervisor) -> None:
    """A rank alone was not preempted, whoever sent it the signal: the run goes on."""
    noticed = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: noticed.set())

    def tell(rank: int) -> list[threading.Thread]:
        ask(supervisor.server, "actor", rank, "tell", HANG_S, event=TERMINATION).result(HANG_S)
        return [thread for thread in threading.enumerate() if getattr(thread, "function", None) is os.kill]

    try:
        alone, again, all_of_them = tell(0), tell(0), tell(1)
        for timer in all_of_them:
            timer.join()
        assert (alone, again, noticed.wait(HANG_S)) == ([], [], True)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_look_that_the_file_system_does_not_answer_does_not_end_the_watch(
    supervisor: Supervisor, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, usual = threading.Event(), processes.ended

    def ended() -> list[Ended]:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return usual()

    monkeypatch.setattr(processes, "ended", ended)
    assert failed.wait(HANG_S)
    processes.end("actor", 1)
    until(lambda: supervisor.failure is not None, "news of the end")
    assert "its process group on n2 ended: Killed" in str(supervisor.failure)


def test_of_two_roles_that_die_the_first_is_named_first_though_its_torchrun_ends_last(processes: Processes) -> None:
    """A torchrun ends its other ranks before it ends."""
    processes.address = "127.0.0.1"
    supervisor = make(processes)
    supervisor.start({"actor": {}, "critic": {}})
    try:
        processes.started["actor", 1].kill()
        time.sleep(3 * POLL_S)
        processes.end("critic", 0)
        assert wait_until(lambda: not processes.news, HANG_S)
        time.sleep(3 * POLL_S)
        assert supervisor.failure is None
        log = processes.directory.logs / "actor.srun.log"
        processes.news.append(Ended("actor", "n2", "was killed by SIGKILL", log))
        verdict = blamed(supervisor, BROKEN)
        head, _, rest = str(verdict).partition("; role critic died: ")
        assert head.startswith("role actor died: its process group on n2 was killed by SIGKILL; gone: rank 1 (pid ")
        assert rest.startswith("its process group on n1 ended: Killed; gone: rank 0 (pid ")
    finally:
        supervisor.stop()


@pytest.mark.parametrize(
    ("absent", "error", "said", "dead"),
    [
        (("actor", 1), RoleDied, "role actor died: rank 1 on n2 is lost before its hello: actor: 1 of 2", {"n2"}),
        (("actor", 0), CallTimeout, f"actor: 1 of 2 ranks said hello within {CONNECT:g} s; missing: 0", set()),
    ],
)
def test_a_node_of_which_nobody_says_hello_is_dead(
    processes: Processes, absent: tuple[str, int], error: type[RunError], said: str, dead: set[str]
) -> None:
    """Its agent is silent, too. That of n1 is heard."""
    processes.absent.add(absent)
    processes.gone = dead
    supervisor = make(processes)
    try:
        with pytest.raises(error, match=said):
            supervisor.start({"actor": {}, "critic": {}})
        assert supervisor.silent_nodes() == dead
    finally:
        supervisor.stop()


def test_an_error_stands_where_everybody_is_heard_or_was_only_busy(
    supervisor: Supervisor, processes: Processes
) -> None:
    assert blamed(supervisor, RemoteError("reward.py returned NaN", user_error=True)) is None
    assert blamed(supervisor, BROKEN) is None
    patience = max(timeouts.VERDICT_S, (SILENT_BEATS + 1) * INTERVAL)
    goes_on = threading.Event()

    def go_on() -> None:
        goes_on.set()
        processes.started["actor", 1].send_signal(signal.SIGCONT)

    processes.started["actor", 1].send_signal(signal.SIGSTOP)
    threading.Timer((patience + LIMIT / 2) / 2, go_on).start()
    assert blamed(supervisor, BROKEN) is None
    assert goes_on.is_set()


@pytest.mark.slow
def test_a_conductor_that_stood_still_blames_itself_and_no_role(tmp_path: Path) -> None:
    """Stopped by a signal until its ranks have left; the first that it sees of them then is that they have ended."""
    script = STOPPED.format(tests=Path(__file__).parent, path=tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as conductor:
        try:
            ranks = [int(pid) for pid in conductor.stdout.readline().split()]
            conductor.send_signal(signal.SIGSTOP)
            assert wait_until(lambda: not any(map(running, ranks)), HANG_S)
            conductor.send_signal(signal.SIGCONT)
            stated, _ = conductor.communicate(timeout=HANG_S)
        finally:
            conductor.kill()
    assert len(ranks) == 3
    assert stated.startswith("the conductor stood still for ")
    assert f"which wait for {LIMIT:g} s (timeout.heartbeat)" in stated
    assert " died: " not in stated


@pytest.mark.parametrize(("engines", "known"), [(None, ["actor", "rollout"]), (object(), ["actor"])])
def test_whose_end_the_launcher_tells_by_role(engines: object, known: list[str]) -> None:
    """Engines that a launcher starts one by one have their own news."""
    some: Any = SimpleNamespace(
        _launcher=SimpleNamespace(address="127.0.0.2", engines=engines),
        _ranks=SimpleNamespace(world=lambda _: 1),
        roles={"actor": object(), "rollout": EngineHandle.__new__(EngineHandle)},
        server=SimpleNamespace(peers=lambda _: {}),
    )
    assert [each.role for each in Supervisor._known(some)] == known

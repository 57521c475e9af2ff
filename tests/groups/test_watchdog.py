"""The watchdog with ranks that are real processes: what it finds, writes and does; the stop, the restart."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hang_peer import HangPeers
from programs import completed
from waiting import HANG_S, scaled, until

from slurm_rlhf.cluster.stop import Stop, StopRequested
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, RoleDied, RunError, RunHung
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.groups.watchdog import MOST_RESTARTS, Watchdog
from slurm_rlhf.nodes.node_look import NodeView, look
from slurm_rlhf.observe.timing import LEARNED, UNKNOWN
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.polling import UNDER_WAY
from slurm_rlhf.run_directory import RunDirectory

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[2]

HELD_CONDUCTOR = """
import sys, time
sys.path.insert(0, "{tests}")
from hang_peer import hold_the_lock
from waiting import scaled
from test_watchdog import Config, Path, RunDirectory, Stop, Watchdog, roleless

config = Config()
config.timeout.heartbeat, config.timeout.heartbeat_interval = scaled(1.0), 0.2
with Stop(Path("{path}")) as stop:
    supervisor = roleless(config, Path("{path}"))
    dog = Watchdog(config, RunDirectory(Path("{path}")), supervisor, stop, print, print, lambda: 1)
    dog.start()
    time.sleep(scaled(1.5))
    print("so far nothing", file=sys.stderr, flush=True)
    def reward_func():
        hold_the_lock(scaled(2.0))
    reward_func()
    dog.close()
"""


class Peers(HangPeers):
    """Implements `nodes.launcher.Launcher`, and its agents: two ranks of the actor on n1."""

    def __init__(self, directory: RunDirectory, limit: float) -> None:
        super().__init__(directory)
        self.agents, self.limit = self, limit

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        endpoint = next(word for word in arguments if word.startswith("--endpoint=")).partition("=")[2]
        for rank in range(2):
            self.add(endpoint, role, rank, self.limit, self.directory.role_log(role, "n1", rank))

    def look(self, pids: Mapping[str, Sequence[int]], within_s: float) -> list[NodeView]:
        return [look("n1", pids["n1"])]


class Watched:
    """A run of two ranks under a watchdog, in step 7."""

    def __init__(self, path: Path, config: Config, stop: Stop, step: int = 7) -> None:
        self.directory = RunDirectory(path / "run")
        self.directory.make()
        self.notes: list[str] = []
        self.stop = stop
        self.peers = Peers(self.directory, config.timeout.heartbeat)
        ranks = place(Topology.uniform(["n1"], 2), [RoleSize("actor", 1, 2)])
        self.supervisor = Supervisor(config, self.directory, ranks, self.peers)
        self.supervisor.start({"actor": {}})
        self.dog = Watchdog(
            config, self.directory, self.supervisor, stop, self.notes.append, self.notes.append, lambda: step
        )
        self.dog.start()

    def learn(self, phase: str) -> None:
        for _ in range(LEARNED):
            self.dog.phase(phase)
            self.dog.ended(phase)
        self.dog.phase(phase)

    def call(self, rank: int, method: str, timeout_s: float = HANG_S) -> Future[Any]:
        return self.supervisor.server.call("actor", rank, method, HANG_S, timeout_s, lambda value: value)

    def stated(self) -> str:
        """The first paragraph, once it is there."""
        until(lambda: self.notes, "a note of the watchdog")
        return self.notes[0]

    def file(self, name: str, directory: str = "hang-7") -> str:
        return (self.directory.root / directory / name).read_text()


@contextmanager
def watched(path: Path, hang_s: float, limit_s: float, on_hang: str = "stop") -> Iterator[Watched]:
    config = Config()
    config.timeout.hang, config.timeout.heartbeat, config.timeout.heartbeat_interval = hang_s, limit_s, 0.2
    config.timeout.shutdown, config.timeout.hang_grace = 1.0, hang_s
    config.train.on_hang = on_hang  # type: ignore[assignment]
    (path / "run").mkdir()
    with Stop(path / "run") as stop:
        run = Watched(path, config, stop)
        try:
            yield run
        finally:
            run.dog.close()
            run.supervisor.stop()


def roleless(config: Config, path: Path) -> Supervisor:
    """Make a supervisor that started no role, which is enough for a watchdog."""
    directory = RunDirectory(path)
    directory.make()
    ranks = place(Topology.uniform(["n1"], 2), [RoleSize("actor", 1, 2)])
    return Supervisor(config, directory, ranks, Peers(directory, config.timeout.heartbeat))


def error_of(call: Future[Any]) -> RunError:
    error = call.exception(HANG_S)
    assert isinstance(error, RunError)
    return error


def test_a_rank_lost_with_its_interpreters_lock_held_is_a_hang_and_not_a_death(tmp_path: Path) -> None:
    """The rank's heartbeats stop before any budget has passed: its stacks are taken before it is given up."""
    with watched(tmp_path, hang_s=HANG_S, limit_s=scaled(5.0)) as run:
        error = error_of(run.call(1, "hold_the_lock"))
        assert isinstance(error, RoleDied)
        ended = run.dog.behind(error)
        assert isinstance(ended, RunHung)
        assert "behind is actor rank 1 on n1" in str(ended)
        assert "a call into C that holds the interpreter's lock, in hold_the_lock (support/hang_peer.py:" in str(ended)
        assert "a rank has sent no heartbeat" in run.stated()
        assert "in hold_the_lock" in run.file("stacks.txt")
        assert "actor rank 1: call hold_the_lock" in run.file("messages.txt")


def test_a_hang_of_the_first_step_is_reported_long_before_the_deadline_and_ends_the_run_at_that_only(
    tmp_path: Path,
) -> None:
    with watched(tmp_path, hang_s=0.2, limit_s=HANG_S) as run:
        run.dog.phase("update")
        call = run.call(1, "work_in_python")
        stated = run.stated()
        assert "behind is actor rank 1 on n1" in stated
        assert f"(budget {UNKNOWN * 0.2:g} s: the usual wait is not known in the first pass)" in stated
        left = float(re.search(r"If nothing moves for ([\d.]+) s more, the run ends", stated)[1])  # type: ignore[index]
        assert 0.5 * HANG_S < left < 0.9 * HANG_S
        time.sleep(5 * run.dog.config.timeout.hang_grace)
        assert not call.done()
        assert run.supervisor.failure is None


def test_neither_a_deadline_nor_a_killed_rank_is_a_hang(tmp_path: Path) -> None:
    with watched(tmp_path, hang_s=1, limit_s=scaled(5.0)) as run:
        late_call = run.call(0, "work_in_python", timeout_s=0.2)
        while not late_call.done():  # something moves all the time, so that its deadline alone ends it
            run.dog.phase("reward")
            time.sleep(0.02)
        late = error_of(late_call)
        assert isinstance(late, CallTimeout)
        assert run.dog.behind(late) is None
        run.learn("update")
        call = run.call(1, "work_in_python")
        run.peers.started[1].kill()
        died = error_of(call)
        assert isinstance(died, RoleDied)
        assert "behind is actor rank 1" in run.stated()  # it is found before its heartbeats have stayed out for long
        assert run.dog.behind(died) is None


def test_a_stopped_trainer_is_seen_from_outside_and_ends_the_run(tmp_path: Path) -> None:
    with watched(tmp_path, hang_s=2, limit_s=HANG_S) as run:
        run.learn("update")
        call = run.call(1, "work_in_python")
        os.kill(run.peers.started[1].pid, signal.SIGSTOP)
        stated = run.stated()
        assert "behind is actor rank 1 on n1" in stated
        assert "its process is T (stopped by a signal; SIGCONT resumes it)" in stated
        assert stated.endswith("If nothing moves for 2 s more, the run ends with an error (train.on_hang = stop).")
        error = error_of(call)
        assert isinstance(error, RunHung)
        assert "hang-7" in str(error)
        assert isinstance(run.dog.behind(error), RunHung)


def test_restart_ends_as_the_requeue_path_does_until_the_same_step_has_hung_too_often(tmp_path: Path) -> None:
    with watched(tmp_path, hang_s=1, limit_s=HANG_S, on_hang="restart") as run:
        run.directory.hang(7, 1).mkdir()
        run.learn("update")
        error = error_of(run.call(1, "work_in_python"))
        ended = run.dog.behind(error)
        assert isinstance(ended, StopRequested)
        assert (ended.reason.requeue, ended.reason.exit_code, ended.saved) == (True, 1, False)
        assert "the run ends and starts again" in run.stated()
        assert "in work_in_python" in run.file("stacks.txt", "hang-7.2")


def test_a_step_that_hangs_each_time_is_not_restarted_for_ever(tmp_path: Path) -> None:
    with watched(tmp_path, hang_s=1, limit_s=HANG_S, on_hang="restart") as run:
        for number in range(1, MOST_RESTARTS + 1):
            run.directory.hang(7, number).mkdir()
        run.learn("update")
        ended = run.dog.behind(error_of(run.call(1, "work_in_python")))
        assert isinstance(ended, RunHung)
        assert f"this step has hung {MOST_RESTARTS + 1} times" in run.stated()


def test_a_run_that_moves_is_left_alone_and_one_whose_trainers_wait_is_stopped_so_that_it_saves(
    tmp_path: Path,
) -> None:
    with watched(tmp_path, hang_s=scaled(1.0), limit_s=HANG_S) as run:
        run.learn("reward")
        for _ in range(30):
            run.dog.phase("reward")
            time.sleep(scaled(0.05))
        assert run.notes == []
        with pytest.raises(StopRequested) as stopped, run.stop.droppable():
            threading.Event().wait(HANG_S)
        assert (stopped.value.reason.requeue, stopped.value.reason.exit_code, stopped.value.saved) == (False, 1, True)
        assert "hang-7" in stopped.value.reason.what
        assert run.dog._saving_s == UNKNOWN * scaled(1.0)  # not timeout.hang: nobody knows yet what saving takes


def test_a_conductor_whose_lock_a_reward_function_holds_writes_its_own_stack(tmp_path: Path) -> None:
    script = HELD_CONDUCTOR.format(tests=Path(__file__).parent, path=tmp_path)
    paths = f"{ROOT}:{ROOT / 'tests' / 'support'}"
    done = completed([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": paths})
    before, _, after = done.stderr.partition("so far nothing")
    assert "Stack" not in before
    assert "Stack (most recent call first):" in after
    assert "in reward_func" in after


def test_code_of_users_may_take_its_deadline_and_its_end_is_a_move(tmp_path: Path) -> None:
    config, notes = Config(), list[str]()
    config.timeout.hang = config.timeout.hang_grace = 0.2
    with Stop(tmp_path) as stop:
        supervisor = roleless(config, tmp_path)
        dog = Watchdog(config, RunDirectory(tmp_path), supervisor, stop, notes.append, notes.append, lambda: 7)
        dog.phase("reward")
        dog.ended("reward")
        dog.phase("reward")
        dog.start()
        with UNDER_WAY.one(777.0):
            until(lambda: notes, "a note of the watchdog")
        dog.close()
        assert "If nothing moves for 777 s more, the run ends" in notes[0]
        until(lambda: "moves again" in notes[-1] or dog._look(), "the end of the call as a move")
        supervisor.stop()

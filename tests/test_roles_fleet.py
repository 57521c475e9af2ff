"""Who is named when a run breaks: real ranks over real sockets, started by a launcher of the test's own."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from control_peer import INTERVAL, start_peer, stop_peer

from slurm_rlhf.cluster.launcher import Ended
from slurm_rlhf.cluster.placement import RoleSize, place
from slurm_rlhf.cluster.topology import Topology
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RemoteError, RoleDied, RunError
from slurm_rlhf.roles.fleet import SILENT_BEATS, VERDICT_S, Fleet
from slurm_rlhf.roles.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(90)
LIMIT = 8.0
BROKEN = RemoteError("train_step failed on actor rank 0: RuntimeError: Connection closed by peer")


class Processes:
    """Implements `cluster.launcher.Launcher`: two ranks of the actor, and nobody sees one of them end."""

    address = "127.0.0.1"

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        endpoint = next(word for word in arguments if word.startswith("--endpoint=")).partition("=")[2]
        self.started = [start_peer(endpoint, self.directory.keys, role, rank, 2, LIMIT) for rank in range(2)]

    def ended(self) -> list[Ended]:
        return []

    def stop(self, done: bool, grace_s: float) -> None:
        for process in self.started:
            stop_peer(process)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    return Processes(directory)


@pytest.fixture
def fleet(processes: Processes) -> Iterator[Fleet]:
    config = Config()
    config.timeout.heartbeat_interval, config.timeout.heartbeat = INTERVAL, LIMIT
    config.timeout.shutdown = 1.0
    ranks = place(Topology.uniform(["n1"], 2), [RoleSize("actor", 1, 2)])
    made = Fleet(config, processes.directory, ranks, processes)
    made.start({"actor": {}})
    try:
        yield made
    finally:
        made.stop()


def blamed(fleet: Fleet, error: RunError) -> tuple[RunError | None, float]:
    """(what is raised instead, after how many seconds)."""
    start = time.monotonic()
    try:
        fleet.blame(error)
    except RunError as other:
        return other, time.monotonic() - start
    return None, time.monotonic() - start


def test_a_silent_rank_is_named_and_not_the_one_whose_collective_it_broke(fleet: Fleet, processes: Processes) -> None:
    processes.started[1].kill()
    verdict, seconds = blamed(fleet, BROKEN)
    assert isinstance(verdict, RoleDied)
    assert "role actor died: rank 1 on " in str(verdict)
    assert f"(pid {processes.started[1].pid}) is lost: it was not heard from for {LIMIT / 2:g} s" in str(verdict)
    assert str(BROKEN) in str(verdict)
    assert LIMIT / 2 - INTERVAL <= seconds < LIMIT  # before the heartbeats alone would have said so
    with pytest.raises(RoleDied, match="rank 1 on"):
        fleet.roles["actor"].call(0, "shutdown").result(5)


def test_an_error_stands_where_everybody_is_heard_or_was_only_busy(fleet: Fleet, processes: Processes) -> None:
    verdict, seconds = blamed(fleet, RemoteError("reward.py returned NaN", user_error=True))
    assert (verdict, seconds < 0.5) == (None, True)
    patience = max(VERDICT_S, (SILENT_BEATS + 1) * INTERVAL)
    verdict, seconds = blamed(fleet, BROKEN)
    assert (verdict, seconds < patience + 1) == (None, True)
    stopped = (patience + LIMIT / 2) / 2
    processes.started[1].send_signal(signal.SIGSTOP)
    threading.Timer(stopped, processes.started[1].send_signal, (signal.SIGCONT,)).start()
    verdict, seconds = blamed(fleet, BROKEN)
    assert verdict is None
    assert stopped <= seconds < LIMIT / 2

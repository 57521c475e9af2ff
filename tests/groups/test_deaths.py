"""Which processes died, in which order, and on which nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.groups.deaths import Death, Deaths, RoleRanks, Silence, StartLogs, culprits
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.messages import Peer

KILLED, FAILED, ABORTED = "was killed by SIGKILL (often: memory)", "ended with status 1", "was killed by SIGABRT"


def end(role: str, how: str = KILLED, node: str = "n") -> Ended:
    return Ended(role, node, how, Path("/dev/null"))


@pytest.mark.parametrize(
    "deaths, named",
    [
        ([("critic", KILLED, 0.5), ("actor", KILLED, 0.0)], ["actor", "critic"]),
        ([("critic", FAILED, 0.5), ("actor", KILLED, 0.0)], ["actor"]),  # it lost its peer
        ([("critic", ABORTED, 0.5), ("actor", KILLED, 0.0)], ["actor"]),  # NCCL, because its peer is gone
        ([("critic", "ended: Exited with exit code 1", 0.5), ("actor", "ended: Killed", 0.0)], ["actor"]),
        ([("critic", "ended: Segmentation fault", 0.5), ("actor", "ended: Killed", 0.0)], ["actor", "critic"]),
        ([("actor", FAILED, 0.0)], ["actor"]),
        ([("actor", FAILED, 0.0), ("critic", KILLED, 0.5)], ["actor", "critic"]),
        ([("actor", KILLED, 0.0), ("actor", KILLED, 0.1)], ["actor"]),  # one role on two nodes
    ],
)
def test_who_died_by_itself_is_named_in_the_order_of_deaths(
    deaths: list[tuple[str, str, float]], named: list[str]
) -> None:
    found = culprits([Death(end(role, how), how, at) for role, how, at in deaths])
    assert [death.end.role for death in found] == named


@pytest.fixture(scope="module")
def gone() -> int:
    """The process id of one that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def ranks(role: str, *pids: int, world: int = 1, here: bool = True) -> RoleRanks:
    peers = [Peer(role, rank, world, "n", pid) for rank, pid in enumerate(pids)]
    return RoleRanks(role, world, peers, here)


def test_the_first_of_two_may_be_the_last_whose_group_ends(gone: int, tmp_path: Path) -> None:
    """The torchrun of two ranks ends the other one first."""
    deaths = Deaths(StartLogs(RunDirectory(tmp_path)))
    alive = [ranks("actor", os.getpid(), gone, world=2), ranks("critic", os.getpid())]
    deaths.note([], alive, 10.0)
    known = [alive[0], ranks("critic", gone)]
    deaths.note([end("critic")], known, 10.5)
    assert deaths.waited_s(11.0) == 0.5
    assert deaths.more_to_come(0.5, known, 2.0, 6.0)
    assert not deaths.more_to_come(6.1, known, 2.0, 6.0)  # it hangs
    deaths.note([end("actor")], known, 11.5)
    assert not deaths.more_to_come(1.0, known, 2.0, 6.0)
    first, stated = deaths.verdict(known, lambda peer: f"rank {peer.rank}")
    assert first.role == "actor"
    assert stated == (
        f"its process group on n {KILLED}; gone: rank 1 (pid {gone}); "
        f"role critic died: its process group on n {KILLED}; gone: rank 0 (pid {gone})"
    )
    deaths.forget(["actor", "critic"])
    assert (deaths.ends, deaths.waited_s(20.0)) == ([], 0.0)
    assert not deaths.more_to_come(0.0, [ranks("actor", os.getpid())], 2.0, 6.0)


REPORT = """Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: {pid})
"""


def test_the_report_of_a_torchrun_tells_rank_and_signal_where_srun_tells_neither(gone: int, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.make()
    deaths = Deaths(StartLogs(directory))
    known = [ranks("actor", os.getpid(), gone, world=2, here=False)]
    directory.role_log("actor", "n", "torchrun").write_text(REPORT.format(pid=gone))
    deaths.note([end("actor", "ended: Exited with exit code 1")], known, 1.0)
    stated = deaths.verdict(known, lambda peer: f"rank {peer.rank} of two")[1]
    assert stated.startswith(f"rank 1 of two on n (pid {gone}) was killed by SIGKILL (often: the memory of the node")
    stated = deaths.verdict([], lambda peer: "nobody")[1]  # before its hello
    assert stated.startswith(f"rank 1 on n (pid {gone}) was killed by SIGKILL (often: ")


def test_a_single_death_is_judged_at_once_but_before_the_hello_of_others(gone: int, tmp_path: Path) -> None:
    deaths = Deaths(StartLogs(RunDirectory(tmp_path)))
    known = [ranks("actor", os.getpid(), gone, world=2), ranks("critic", os.getpid())]
    deaths.note([end("actor")], known, 1.0)
    assert not deaths.more_to_come(0.0, known, 2.0, 6.0)
    starting = [known[0], ranks("critic")]
    assert deaths.more_to_come(1.9, starting, 2.0, 6.0)
    assert not deaths.more_to_come(2.0, starting, 2.0, 6.0)


def test_processes_of_another_machine_are_not_looked_for(gone: int) -> None:
    assert not ranks("actor", gone, here=False).gone


def peer(role: str, rank: int, host: str, lost: str = "", silent: bool = False) -> Peer:
    return Peer(role, rank, 2, host, 100 + rank, lost=lost, silent=silent)


def silent_nodes(peers: list[Peer], quiet: list[Peer], dead: tuple[str, ...] = ()) -> set[str]:
    server: Any = SimpleNamespace(peers=lambda role: peers, silent=lambda seconds: quiet)
    return Silence(server, ["any"], Timeout()).nodes(dead)


def test_a_node_whose_ranks_are_silent_is_gone_unless_one_of_them_speaks() -> None:
    one, two, critic = peer("actor", 0, "n1"), peer("actor", 1, "n2"), peer("critic", 0, "n2")
    assert silent_nodes([one, two], []) == set()
    assert silent_nodes([one, two], [two]) == {"n2"}
    assert silent_nodes([one, two, critic], [two]) == set()
    assert silent_nodes([one, peer("actor", 1, "n2", "not heard from for 12 s", silent=True)], []) == {"n2"}
    assert silent_nodes([one, two, critic], [two, critic]) == {"n2"}


def test_a_live_node_whose_engine_is_importing_is_not_gone() -> None:
    """The other rank was killed, or ended to start elsewhere: the engine has said no hello, so nobody is heard."""
    one = peer("actor", 0, "n1")
    assert silent_nodes([one, peer("actor", 1, "n2", "its torchrun ended: Killed")], []) == set()
    assert silent_nodes([one], []) == set()


def test_a_node_that_died_before_its_first_hello_is_gone_until_it_is_heard() -> None:
    one = peer("actor", 0, "n1")
    assert silent_nodes([one], [], dead=("n2",)) == {"n2"}
    assert silent_nodes([one, peer("actor", 1, "n2")], [], dead=("n2",)) == set()

"""Which launcher started this process, and which rank of which role a process of COMM_WORLD is."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from waiting import HANG_S

from slurm_rlhf.cli.commands import Arguments, commands
from slurm_rlhf.cli.mpi import _first, lead_or_follow
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.errors import ConfigError, PlacementError
from slurm_rlhf.nodes.mpi.assignment import Launched, Process, check_world, launched, place_processes
from slurm_rlhf.nodes.mpi.rank import MpiLauncher, lead

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
}
SIX = Launched("mpirun", "OMPI_COMM_WORLD_SIZE", 6, 0)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_MCA_btl": "tcp"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "2"}, ("mpirun", 6, 2)),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, ("mpirun", 1, 0)),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, ("mpiexec", 4, 3)),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        # srun: with whatever --mpi, several tasks mean several ranks, one task means an ordinary start
        ({**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "5"}, ("srun", 6, 5)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "5", "PMI_SIZE": "6", "PMI_RANK": "5"}, ("srun", 6, 5)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "1"}, None),
        # mpirun starts its daemons by srun, one task a node
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "1"}, SIX),
        # salloc's interactive step
        ({**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, None),
    ],
)
def test_launched(environ: Mapping[str, str], expected: tuple[str, int, int] | Launched | None) -> None:
    found = launched(environ)
    if isinstance(expected, Launched):
        assert found == replace(expected, rank=1)
    else:
        assert (found and (found.by, found.size, found.rank)) == expected


def test_silent_worlds_of_one_are_an_error_with_a_remedy() -> None:
    check_world(SIX, 6)
    with pytest.raises(ConfigError, match=r"mpirun started 6 processes \(OMPI_COMM_WORLD_SIZE=6\).*MPICC=mpicc"):
        check_world(SIX, 1)
    with pytest.raises(ConfigError, match=r"srun started 6 .*srun --mpi=pmix"):
        check_world(Launched("srun", "SLURM_STEP_NUM_TASKS", 6, 0), 1)


def six(actor: int = 2, engines: int = 2) -> Config:
    config = Config()
    config.actor.num_gpus_per_node = actor
    config.vllm.num_engines = engines
    return config


def cpus(*nodes: str) -> list[Process]:
    return [Process(node, (0, 1), ()) for node in nodes]


def test_every_process_gets_a_rank_by_the_placement() -> None:
    placed = place_processes(six(), cpus(*["n1"] * 6), SIX)
    assert placed.ranks.worlds == {"actor": 2, "critic": 1, "reference": 1, "rollout": 2}
    assert placed.assignments == (
        *(("actor", "n1", 0), ("actor", "n1", 1), ("critic", "n1", 0), ("reference", "n1", 0)),
        *(("rollout", "n1", 0), ("rollout", "n1", 1)),
    )


def test_ranks_dealt_over_nodes_like_cards_are_counted_on_each_node() -> None:
    config = six()
    config.actor.num_nodes, config.actor.num_gpus_per_node = 2, 1
    placed = place_processes(config, cpus(*["n2", "n1"] * 3), SIX)
    assert [node.name for node in placed.ranks.topology.nodes] == ["n2", "n1"]
    assert len(set(placed.assignments)) == 6
    assert placed.assignments[0] == ("actor", "n2", 0)
    assert placed.assignments[1] == ("actor", "n1", 0)
    assert [share.ranks for share in placed.ranks.roles["actor"]] == [(0,), (1,)]


def test_gpus_are_those_that_all_see_or_those_that_each_is_bound_to() -> None:
    shared = place_processes(six(), [Process("n1", (0,), ("4", "5", "6", "7", "2", "3", "1"))] * 6, SIX)
    assert shared.ranks.topology.nodes[0].devices == ("4", "5", "6", "7", "2", "3")
    bound = place_processes(six(), [Process("n1", (i,), (f"GPU-{i}",)) for i in range(6)], SIX)
    assert bound.ranks.topology.nodes[0].devices == tuple(f"GPU-{i}" for i in range(6))
    assert bound.ranks.topology.nodes[0].cpus == 6
    with pytest.raises(PlacementError, match=r"node n1 has 6 processes and 4 GPUs.*--ntasks-per-node=4"):
        place_processes(six(), [Process("n1", (0,), ("0", "1", "2", "3"))] * 6, SIX)
    with pytest.raises(PlacementError, match="node n1 has 6 processes and 2 GPUs"):  # no process is bound to one
        place_processes(six(), [Process("n1", (i,), (f"{i}", "9")) for i in range(6)], SIX)
    with pytest.raises(PlacementError, match=r"6 processes and 1 GPU.*--gpus-per-task .*--gpu-bind=none"):  # cgroups
        place_processes(six(), [Process("n1", (i,), ("0",)) for i in range(6)], SIX)


def test_the_number_of_processes_is_that_of_the_ranks() -> None:
    with pytest.raises(PlacementError, match=r"started 5 processes, but the roles have 6 ranks .*mpirun -np 6"):
        place_processes(six(), cpus(*["n1"] * 5), SIX)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train.colocate_all", True, "Leave the key out, or start the run by sbatch"),
        ("train.colocate_actor_ref", True, "Leave the key out, or start the run by sbatch"),
        ("train.colocate_critic_reward", True, "Leave the key out, or start the run by sbatch"),
        ("reward.workers_num_nodes", 1, r"reward.workers_num_nodes does not work with mpirun.*Leave the key out"),
        ("cluster.spares", 1, r"cluster.spares does not work with mpirun: there every process holds a rank"),
    ],
)
def test_what_has_no_place_under_mpi_is_refused(key: str, value: object, said: str) -> None:
    config = six(actor=1)
    put(config, key, value)
    with pytest.raises(ConfigError, match=said):
        place_processes(config, cpus(*["n1"] * 6), SIX)


def test_ranks_that_are_done_are_waited_for() -> None:
    said: list[str] = []
    looks = chain([[SimpleNamespace(lost="", role="actor")]] * 3, repeat([]))
    agents: Any = SimpleNamespace(
        address="",
        server=SimpleNamespace(peers=lambda role: next(looks)),
        call=lambda peer, method, *_: said.append(method) or Future(),
        close=lambda: said.append("closed"),
    )
    MpiLauncher(agents, cast(Any, SimpleNamespace(roles=["actor"]))).stop(True, HANG_S)
    assert said == ["leave", "closed"]


def test_a_conductor_that_was_killed_has_the_exit_code_that_a_shell_gives_it() -> None:
    nobody: Any = SimpleNamespace(broadcast=lambda *_: None)
    script = "set -- $(cat /proc/$$/stat); [ $6 = $$ ] && kill -9 $$"  # in a session of its own
    assert lead(nobody, nobody, nobody, HANG_S, ["sh", "-c", script], "") == 128 + 9


def test_an_error_of_mpi_is_printed_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_rlhf.cli.mpi.Communicator", Mock(side_effect=ConfigError("no MPI")))
    monkeypatch.setenv(SIX.variable, "6")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    begun = commands()["train"].load()
    assert begun(cast(Any, None)) == ConfigError.exit_code
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(ConfigError, match="no MPI"):
        begun(cast(Any, None))


@pytest.mark.parametrize("name", [name for name, command in commands().items() if command.by_mpi])
def test_torchrun_starts_ranks_of_stages_under_mpi(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands()[name].load() is not lead_or_follow
    monkeypatch.setenv(SIX.variable, "6")
    assert commands()[name].load() is lead_or_follow
    monkeypatch.setenv("RANK", "0")
    assert (commands()[name].load() is lead_or_follow) == (name not in STAGES)


def test_a_configuration_that_is_refused_is_reported_once_and_lets_the_other_ranks_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated: list[Any] = []  # by the first of two ranks
    world: Any = SimpleNamespace(broadcast=stated.append)
    start = Launched("mpirun", "OMPI_COMM_WORLD_SIZE", 2, 0)
    arguments = Arguments(commands()["train"], [tmp_path / "no.toml"], [], [], {})
    assert _first(world, arguments, start, []) == ConfigError.exit_code
    assert stated == [None]
    err = capsys.readouterr().err
    assert err.startswith("slurm-rlhf: error: ")
    assert "no.toml" in err

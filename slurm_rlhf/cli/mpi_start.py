"""Start a run under MPI: what each of the N processes of `mpirun -np N slurm-rlhf train FILE.toml` does.

Rank 0 starts `python -m slurm_rlhf.cli.mpi_start START SOCKET` as a child: the conductor.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rlhf.cli import mpi_preflight
from slurm_rlhf.cli.main import Arguments, guarded
from slurm_rlhf.cli.placement_report import check_memory, print_resolved
from slurm_rlhf.cli.preflight import OFF, show, tell
from slurm_rlhf.cluster.gpu_memory import memory_on
from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.launch.mpi.assignment import Assignment, Launched, Placed, Process, place_processes, this_process
from slurm_rlhf.launch.mpi.communicator import Communicator
from slurm_rlhf.launch.mpi.launcher import Channel, MpiLauncher
from slurm_rlhf.launch.mpi.rank import follow, lead
from slurm_rlhf.placement.rank_map import RankMap, draw

NO_RECOVERY = "no role can be restarted alone: if a rank fails the run ends, and the same command resumes it"


def train(arguments: Arguments, start: Launched) -> int:
    """Return the exit code of the run on rank 0, 0 on the others: the launcher's own. Raises SlurmRlhfError."""
    return _together(start, lambda world: _first(world, arguments, start))


def preflight(arguments: Arguments, start: Launched) -> int:
    """Look at the nodes and print what is found on rank 0; return the exit codes as `train`."""
    return _together(start, lambda world: _look(world, arguments, start))


def _together(start: Launched, first: Callable[[Communicator], int]) -> int:
    try:
        world = Communicator(start)
    except SlurmRlhfError as error:
        if start.rank:
            return error.exit_code  # rank 0 prints it
        raise
    code = first(world) if world.rank == 0 else _other(world)
    world.leave()
    return code


def _first(world: Communicator, arguments: Arguments, start: Launched) -> int:
    """Run rank 0. Errors in the configuration are printed once, before any rank loads anything."""
    processes = [_process(fields) for fields in world.gather(asdict(this_process()))]
    try:
        config = load_config(arguments.files, arguments.overrides)
        check(config)
        placed = place_processes(config, processes, start)
        check_memory(config, placed.ranks)
        if "dry_run" not in arguments.flags and config.preflight != OFF:
            tell(mpi_preflight.lead(world, config, placed.ranks, processes))
    except SlurmRlhfError as error:
        return _refuse(world, error)
    if "dry_run" in arguments.flags:
        world.broadcast(None)
        from slurm_rlhf.cli.check import look, read

        print_resolved(config, draw(placed.ranks), memory_on(config, placed.ranks), look(config, read(config)))
        return 0
    return _run(world, config, placed, arguments)


def _look(world: Communicator, arguments: Arguments, start: Launched) -> int:
    processes = [_process(fields) for fields in world.gather(asdict(this_process()))]
    try:
        config = load_config(arguments.files, arguments.overrides)
        check(config)
        placed = place_processes(config, processes, start)
        report = mpi_preflight.lead(world, config, placed.ranks, processes, full=True)
    except SlurmRlhfError as error:
        return _refuse(world, error)
    world.broadcast(None)
    return show(report, "json" in arguments.flags)


def _refuse(world: Communicator, error: SlurmRlhfError) -> int:
    world.broadcast(None)
    print(f"slurm-rlhf: error: {error}", file=sys.stderr)
    return error.exit_code


def _run(world: Communicator, config: Config, placed: Placed, arguments: Arguments) -> int:
    ranks = placed.ranks.to_json()
    world.broadcast({"ranks": ranks, "assignments": placed.assignments, "start_s": config.timeout.start})
    nodes = len(placed.ranks.topology.nodes)
    print(f"MPI: {world.size} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}; {NO_RECOVERY}", flush=True)
    own = placed.assignments[0]
    if (slurm := read_slurm(os.environ)) is not None:
        print(f"job {slurm.job_id}, run directory {config.run_dir}")
        print(f"to look inside: {attach_line(str(slurm.job_id), own.node)}", flush=True)
    elsewhere = next((node.name for node in placed.ranks.topology.nodes if node.name != own.node), None)
    address = address_towards(elsewhere) if elsewhere else "127.0.0.1"
    found = [[str(file.absolute()) for file in arguments.files], arguments.overrides, ranks, address]
    conductor = [sys.executable, "-m", "slurm_rlhf.cli.mpi_start", json.dumps(found)]
    return lead(world, placed.ranks, own, config.timeout.start, conductor, Path(config.run_dir))


def _other(world: Communicator) -> int:
    world.gather(asdict(this_process()))
    message = mpi_preflight.follow(world)
    if message is not None:
        own = Assignment(*message["assignments"][world.rank])
        follow(world, RankMap.from_json(message["ranks"]), own, message["start_s"])
    return 0


def _process(fields: dict[str, Any]) -> Process:
    return Process(fields["node"], tuple(fields["cpus"]), tuple(fields["gpus"]))


def run_conductor(start: str, channel: int) -> int:
    """Run the conductor in the child of rank 0; `channel` is the socket that leads to rank 0.

    `start`: what rank 0 has found out, as JSON: files and overrides, rank map, address. Raises as `conductor.run`.
    """
    files, overrides, rank_map, address = json.loads(start)
    config = load_config(files, overrides)
    ranks = RankMap.from_json(rank_map)
    launcher = MpiLauncher(Channel(socket.socket(fileno=channel)), ranks, address)
    from slurm_rlhf.controller import conductor

    return conductor.run_here(config, ranks, launcher)


if __name__ == "__main__":
    sys.exit(guarded(lambda: run_conductor(sys.argv[1], int(sys.argv[2]))))

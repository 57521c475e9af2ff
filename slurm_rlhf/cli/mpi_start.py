"""Start a run under MPI, in each of the N processes of `mpirun -np N slurm-rlhf train FILE.toml`.

Rank 0 starts `python -m slurm_rlhf.cli.mpi_start START FILE` as a child: the conductor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cli.main import guarded
from slurm_rlhf.cli.plan import check_memory, print_resolved
from slurm_rlhf.cli.preflight import OFF, QUICK, local_question, show, tell
from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.resources import memory_on, node_name
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import SlurmRlhfError, printable
from slurm_rlhf.nodes.accelerators import seen_by_processes
from slurm_rlhf.nodes.child_process import bound_to_parent
from slurm_rlhf.nodes.examination import Examination
from slurm_rlhf.nodes.facts import Orders
from slurm_rlhf.nodes.mpi.assignment import Assignment, Launched, Placed, Process, place_processes, this_process
from slurm_rlhf.nodes.mpi.communicator import Communicator
from slurm_rlhf.nodes.node_look import equipment
from slurm_rlhf.nodes.report import Report
from slurm_rlhf.nodes.srun import AGENT
from slurm_rlhf.placement.rank_map import RankMap, draw
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

NO_RECOVERY = "no role can be restarted alone: if a rank fails the run ends, and the same command resumes it"


def train(arguments: Arguments, start: Launched) -> int:
    """Train; return the exit code of the run on rank 0, and 0 on the other ranks. Raises SlurmRlhfError."""
    return _together(start, lambda world: _first(world, arguments, start))


def preflight(arguments: Arguments, start: Launched) -> int:
    """Examine the nodes, and print the report on rank 0; return the exit codes as `train`."""
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
    """Run rank 0. It prints errors in the configuration once, before any rank loads a model."""
    processes = [_process(fields) for fields in world.gather(asdict(this_process()))]
    try:
        config = load_config(arguments.files, arguments.overrides)
        check(config)
        placed = place_processes(config, processes, start)
        config = check_memory(config, placed.ranks)
        if "dry_run" not in arguments.options and config.preflight != OFF:
            tell(examine_nodes(world, config, placed.ranks, processes))
    except SlurmRlhfError as error:
        return _refuse(world, error)
    if "dry_run" in arguments.options:
        world.broadcast(None)
        from slurm_rlhf.cli.check import looked

        print_resolved(config, draw(placed.ranks), memory_on(config, placed.ranks), looked(config))
        return 0
    return _run(world, config, placed, arguments)


def _look(world: Communicator, arguments: Arguments, start: Launched) -> int:
    processes = [_process(fields) for fields in world.gather(asdict(this_process()))]
    try:
        config = load_config(arguments.files, arguments.overrides)
        check(config)
        placed = place_processes(config, processes, start)
        report = examine_nodes(world, config, placed.ranks, processes, full=True)
    except SlurmRlhfError as error:
        return _refuse(world, error)
    world.broadcast(None)
    return show(report, "json" in arguments.options)


def _refuse(world: Communicator, error: SlurmRlhfError) -> int:
    world.broadcast(None)
    print(f"slurm-rlhf: error: {printable(str(error))}", file=sys.stderr)
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
    address = address_among([node.name for node in placed.ranks.topology.nodes], own.node)
    # The conductor reads the configuration anew, and with it what the memory of the GPUs has decided.
    overrides = [*arguments.overrides, f"--train.gradient_checkpointing={config.train.gradient_checkpointing}"]
    found = [[str(file.absolute()) for file in arguments.files], overrides, ranks, address]
    conductor = [sys.executable, "-m", "slurm_rlhf.cli.mpi_start", json.dumps(found)]
    from slurm_rlhf.nodes.mpi.rank import lead

    return lead(world, placed.ranks, own, config.timeout.start, conductor)


def _other(world: Communicator) -> int:
    world.gather(asdict(this_process()))
    message = obey(world)
    if message is not None:
        from slurm_rlhf.nodes.mpi.rank import follow

        own = Assignment(*message["assignments"][world.rank])
        follow(world, RankMap.from_json(message["ranks"]), own, message["start_s"])
    return 0


def _process(fields: dict[str, Any]) -> Process:
    return Process(fields["node"], tuple(fields["cpus"]), tuple(fields["gpus"]))


def run_conductor(start: str, orders: int) -> int:
    """Run the conductor in the child of rank 0; `orders`: the file into which those of the agents are written.

    `start`: what rank 0 has found out, as JSON: files and overrides, rank map, address. Raises as `conductor.lead_run`.
    """
    from slurm_rlhf.nodes.mpi.launcher import MpiLauncher

    files, overrides, rank_map, address = json.loads(start)
    config = load_config(files, overrides)
    run_dir = Path(config.run_dir)
    launcher = MpiLauncher(run_dir, RankMap.from_json(rank_map), address, config.timeout)
    with open(orders, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(launcher.agents.orders(run_dir))) + "\n")
    from slurm_rlhf.run import conductor

    return conductor.run_here(config, RankMap.from_json(rank_map), launcher)


def examine_nodes(
    world: Communicator, config: Config, ranks: RankMap, processes: Sequence[Process], full: bool = False
) -> Report:
    """Examine the nodes from rank 0, while the other ranks `obey`."""
    gpus = ranks.topology.accelerator == GPU
    world.broadcast({"equipment": gpus})
    wanted, seen = seen_by_processes(world.gather(_own_equipment(gpus)), gpus, config.ds.attn_implementation)
    nodes = tuple(dict.fromkeys(process.node for process in processes))
    asked = local_question(config, ranks, "start it with a GPU for each process")
    asked = replace(
        asked,
        nodes=nodes,
        address=address_among(nodes, node_name()),
        needs=replace(asked.needs, wanted=wanted),
        equipment=seen,
        thorough=full,
        measure=full or (config.preflight != QUICK and len(nodes) > 1),
    )
    first = {node: next(rank for rank, each in enumerate(processes) if each.node == node) for node in nodes}
    return Examination(asked, MpiStarter(world, first)).run().report


def obey(world: Communicator) -> Any:
    """Take part as any rank but 0, as often as rank 0 wants; return its first message about something else."""
    wait_s = timeouts.MPI_EXAMINE_S
    while (message := world.broadcast(timeout_s=wait_s + timeouts.MPI_EXAMINE_S)) is not None:
        if "equipment" in message:
            world.gather(_own_equipment(message["equipment"]))
        elif "agents" in message:
            wait_s = message["limit_s"] + timeouts.MPI_EXAMINE_S
            if world.rank in message["agents"]:
                world.send(0, {"printed": _agent(message["environment"])})
        else:
            break
    return message


def _own_equipment(gpus: bool) -> dict[str, Any]:
    return {"node": node_name(), **equipment(gpus)}


def _agent(environment: Mapping[str, str]) -> list[str]:
    """Run the agent of this node; return its output and errors."""
    done = _start(environment)
    return list(done.communicate())


def _start(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        bound_to_parent([sys.executable, "-m", AGENT]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


class MpiStarter:
    """Implement `nodes.starters.Starter` on rank 0; `first` maps a node to its first rank."""

    def __init__(self, world: Communicator, first: Mapping[str, int]) -> None:
        self._world = world
        self._agents = set(first.values())
        self._own: subprocess.Popen[str] | None = None
        self._printed: list[list[str]] = []
        self._limit_s = 0.0

    def start(self, orders: Orders) -> None:
        self._limit_s = orders.limit_s
        environment = orders.to_environment()
        self._world.broadcast({"agents": sorted(self._agents), "environment": environment, "limit_s": orders.limit_s})
        if self._world.rank in self._agents:
            self._own = _start(environment)

    def said(self) -> tuple[str, str]:
        self._hear()
        return "".join(out for out, _ in self._printed), "".join(err for _, err in self._printed)

    def over(self) -> bool:
        self._hear()
        return len(self._printed) == len(self._agents)

    def end(self) -> None:
        """Wait for the agents, which end at the goodbye: what a rank said later would be taken for a report."""
        wait_until(self.over, self._limit_s + timeouts.MPI_EXAMINE_S, timeouts.POLL_S, timeouts.POLL_S)

    def _hear(self) -> None:
        if self._own is not None and self._own.poll() is not None:
            self._printed.append(list(self._own.communicate()))
            self._own = None
        while (message := self._world.receive()) is not None:
            self._printed.append(message["printed"])


if __name__ == "__main__":
    sys.exit(guarded(lambda: run_conductor(sys.argv[1], int(sys.argv[2]))))

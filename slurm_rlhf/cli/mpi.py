"""Run `train`, the stages and `preflight` under MPI, in each of the N processes of `mpirun -np N slurm-rlhf ...`.

Rank 0 starts `python -m slurm_rlhf.cli.mpi FD` as a child: the conductor. Its standard input has what rank 0 found out.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import convert

from slurm_rlhf.cli import plan
from slurm_rlhf.cli.check import looked
from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cli.main import guarded
from slurm_rlhf.cli.preflight import OFF, question, show, tell
from slurm_rlhf.cli.train import led, stage_config
from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.resources import memory_on
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.errors import SlurmRlhfError, printable
from slurm_rlhf.nodes.examination import examine_nodes
from slurm_rlhf.nodes.mpi.assignment import (
    Assignment,
    Communicator,
    Launched,
    Placed,
    Process,
    launched,
    place_processes,
    this_process,
)
from slurm_rlhf.nodes.needs import needs_of, seen_by_processes
from slurm_rlhf.nodes.node_look import equipment
from slurm_rlhf.nodes.report import Report
from slurm_rlhf.placement.rank_map import RankMap, draw
from slurm_rlhf.placement.topology import GPU

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_steps import AgentServer

EXAMINE = "preflight"
NO_RECOVERY = "no role can be restarted alone: if a rank fails the run ends, and the same command resumes it"


def lead_or_follow(arguments: Arguments) -> int:
    """Train, or examine the nodes and print the report; return the exit code on rank 0, and 0 on the other ranks.

    Raises SlurmRlhfError.
    """
    start = launched(os.environ)
    assert start is not None  # `Command.load` has looked
    try:
        world = Communicator(start)
    except SlurmRlhfError as error:
        if start.rank:
            return error.exit_code  # rank 0 prints it
        raise
    own = this_process()
    seen = world.gather({**asdict(own), "equipment": {"node": own.node, **equipment(bool(own.gpus))}})
    code = _first(world, arguments, start, seen) if world.rank == 0 else _other(world)
    world.leave()
    return code


def _first(world: Communicator, arguments: Arguments, start: Launched, seen: list[dict[str, Any]]) -> int:
    """Run rank 0. It prints errors in the configuration once, before any rank loads a model."""
    name = arguments.command.name
    try:
        if name in STAGES:
            config = stage_config(arguments)
        else:
            config = load_config(arguments.files, arguments.overrides)
            check(config)
        placed = place_processes(of_command(config, name), convert(seen, list[Process]), start)
        if name != EXAMINE:
            config = plan.check_memory(config, placed.ranks, name)
    except SlurmRlhfError as error:
        return _refuse(world, error)
    if "dry_run" in arguments.options:
        world.broadcast(None)
        plan.print_resolved(config, draw(placed.ranks), memory_on(config, placed.ranks), looked(config))
        return 0
    if name != EXAMINE:
        _tell(of_command(config, name).run_dir, placed)
    ranks, nodes, own = placed.ranks.to_json(), placed.ranks.topology.nodes, placed.assignments[0]
    world.broadcast({"ranks": ranks, "assignments": placed.assignments, "start_s": config.timeout.start})
    found = {
        "command": name,
        "files": [str(file.absolute()) for file in arguments.files],
        # The conductor loads the configuration again; the last override is what `check_memory` has decided here.
        "overrides": [*arguments.overrides, f"--train.gradient_checkpointing={config.train.gradient_checkpointing}"],
        "ranks": ranks,
        "address": address_among([node.name for node in nodes], own.node),
        "seen": [fields["equipment"] for fields in seen],
        "json": "json" in arguments.options,
    }
    conductor = [sys.executable, "-m", "slurm_rlhf.cli.mpi"]
    from slurm_rlhf.nodes.mpi.rank import lead

    return lead(world, placed.ranks, own, config.timeout.start, conductor, json.dumps(found))


def _refuse(world: Communicator, error: SlurmRlhfError) -> int:
    world.broadcast(None)
    print(f"slurm-rlhf: error: {printable(str(error))}", file=sys.stderr)
    return error.exit_code


def _tell(run_dir: str, placed: Placed) -> None:
    nodes = len(placed.ranks.topology.nodes)
    ranks = len(placed.assignments)
    print(f"MPI: {ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}; {NO_RECOVERY}", flush=True)
    if (slurm := read_slurm(os.environ)) is not None:
        print(f"job {slurm.job_id}, run directory {run_dir}")
        print(f"to look inside: {attach_line(str(slurm.job_id), placed.assignments[0].node)}", flush=True)


def _other(world: Communicator) -> int:
    message = world.broadcast()
    if message is not None:
        from slurm_rlhf.nodes.mpi.rank import follow

        own = Assignment(*message["assignments"][world.rank])
        follow(world, RankMap.from_json(message["ranks"]), own, message["start_s"])
    return 0


def run_conductor(orders: int) -> int:
    """Run the conductor in the child of rank 0; `orders`: file descriptor to which it writes the agents' orders.

    Standard input has what rank 0 has found out, as JSON. Raises as `led`.
    """
    from slurm_rlhf.nodes.mpi.rank import MpiAgents, MpiLauncher

    start = json.load(sys.stdin)
    config, ranks = load_config(start["files"], start["overrides"]), RankMap.from_json(start["ranks"])
    placed = of_command(config, name := start["command"])
    with closing(MpiAgents(Path(placed.run_dir), start["address"], config.timeout, orders)) as agents:
        if name == EXAMINE:
            return show(_examine(placed, ranks, start["seen"], agents, full=True), start["json"])
        if config.preflight == OFF:
            agents.begin(agents.orders())
        else:
            tell(_examine(placed, ranks, start["seen"], agents))
        return led(config, name, ranks, MpiLauncher(agents, ranks))


def _examine(
    config: Config, ranks: RankMap, seen: list[dict[str, Any]], agents: AgentServer, full: bool = False
) -> Report:
    """Examine the nodes; `seen`: what each process sees of its GPUs."""
    gpus = ranks.topology.accelerator == GPU
    wanted, equipped = seen_by_processes(seen, gpus, config.ds.attn_implementation)
    needs = replace(needs_of(config, ranks, "start it with a GPU for each process"), wanted=wanted)
    asked = question(config, ranks, needs, [node.name for node in ranks.topology.nodes], full=full)
    report, _ = examine_nodes(replace(asked, equipment=equipped, thorough=full), agents)
    return report


if __name__ == "__main__":
    sys.exit(guarded(lambda: run_conductor(int(sys.argv[1]))))

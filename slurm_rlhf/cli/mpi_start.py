"""`mpirun -np N slurm-rlhf train FILE.toml`: what each of the N processes does."""

from __future__ import annotations

import os
import secrets
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rlhf.cli.arguments import Arguments
from slurm_rlhf.cli.conductor import Orders
from slurm_rlhf.cli.placement_report import check_memory, draw_memory, memory_on
from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.session import attach_line
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.values import dump_toml
from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.launch.accelerators import judge_accelerators, seen_by_processes
from slurm_rlhf.launch.mpi.communicator import World
from slurm_rlhf.launch.mpi.environment import Launched, Placed, Process, place_processes, this_process
from slurm_rlhf.launch.mpi.rank import follow, lead
from slurm_rlhf.launch.preflight import judge
from slurm_rlhf.launch.probe import answer, versions
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.render import draw
from slurm_rlhf.placement.topology import GPU

NO_RECOVERY = "no role is started again alone: with a rank the run ends, and the same command goes on from there"


def train(arguments: Arguments, start: Launched) -> int:
    """The exit code of the run on rank 0, 0 on the others, so that it is the launcher's. Raises SlurmRlhfError."""
    try:
        world = World(start)
    except SlurmRlhfError as error:
        if start.rank:
            return error.exit_code  # rank 0 says it
        raise
    code = _first(world, arguments, start) if world.rank == 0 else _other(world)
    world.leave()
    return code


def _first(world: World, arguments: Arguments, start: Launched) -> int:
    """Rank 0. What the user has wrong is said once, and before any rank loads anything."""
    processes = [_process(words) for words in world.gather(asdict(this_process()))]
    try:
        config = load_config(arguments.file, arguments.overrides)
        check(config)
        placed = place_processes(config, processes, start)
        check_memory(config, placed.ranks)
        if "dry_run" not in arguments.flags:
            for note in _look_around(world, config, placed.ranks, processes):
                print(note, flush=True)
    except SlurmRlhfError as error:
        world.broadcast(None)
        print(f"slurm-rlhf: error: {error}", file=sys.stderr)
        return error.exit_code
    if "dry_run" in arguments.flags:
        world.broadcast(None)
        print(dump_toml(config))
        memory = draw_memory(config, memory_on(config, placed.ranks))
        print(textwrap.indent(f"{draw(placed.ranks)}\n\n{memory}", "# ", lambda line: True))
        return 0
    return _run(world, config, placed, arguments)


def _run(world: World, config: Config, placed: Placed, arguments: Arguments) -> int:
    world.broadcast(
        {"ranks": placed.ranks.to_json(), "seats": placed.seats, "start_s": config.timeout.start},
    )
    nodes = len(placed.ranks.topology.nodes)
    print(f"MPI: {world.size} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}; {NO_RECOVERY}", flush=True)
    own = placed.seats[0][1]
    if (slurm := read_slurm(os.environ)) is not None:
        print(f"job {slurm.job_id}, run directory {config.run_dir}")
        print(f"to look inside: {attach_line(str(slurm.job_id), own)}", flush=True)
    elsewhere = next((node.name for node in placed.ranks.topology.nodes if node.name != own), None)
    orders = Orders(
        str(arguments.file.absolute()),
        arguments.overrides,
        placed.ranks.to_json(),
        address_towards(elsewhere) if elsewhere else "127.0.0.1",
    )
    command = [sys.executable, "-m", "slurm_rlhf.cli.conductor", orders.to_word()]
    return lead(world, placed.ranks, placed.seats[0], config.timeout.start, command, Path(config.run_dir))


def _other(world: World) -> int:
    world.gather(asdict(this_process()))
    words = world.broadcast()
    if words is not None and "canary" in words:
        world.gather(answer(Path(words["canary"]), gpus=words["gpus"]))
        words = world.broadcast()
    if words is not None:
        role, node, index = words["seats"][world.rank]
        follow(world, RankMap.from_json(words["ranks"]), (role, node, index), words["start_s"])
    return 0


def _look_around(world: World, config: Config, ranks: RankMap, processes: list[Process]) -> list[str]:
    """Does every process see the run directory, with the same packages and usable GPUs? Notes for the user.

    Raises as `judge` and `judge_accelerators` do.
    """
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    canary = run_dir / f".canary.{token}"
    canary.write_text(token, encoding="utf-8")
    gpus = ranks.topology.accelerator == GPU
    try:
        world.broadcast({"canary": str(canary), "gpus": gpus})
        answers: list[dict[str, Any]] = world.gather(answer(canary, gpus=gpus))
    finally:
        canary.unlink(missing_ok=True)
    nodes = list(dict.fromkeys(process.node for process in processes))
    judge({said["node"]: said for said in answers}, nodes, run_dir, token, versions(), "")
    wanted, equipment = seen_by_processes(answers, gpus, config.ds.attn_implementation)
    return judge_accelerators(equipment, wanted, "start it with a GPU for each process")


def _process(words: dict[str, Any]) -> Process:
    return Process(words["node"], tuple(words["cpus"]), tuple(words["gpus"]))

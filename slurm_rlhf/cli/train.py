"""Start training: `slurm-rlhf train` and the stages (`sft`, `rm`, `dpo`) here, `submit` as a Slurm job.

Under MPI the same command runs in each of the N processes of `mpirun -np N slurm-rlhf train FILE.toml`. Rank 0 starts
`python -m slurm_rlhf.cli.train FD` as a child: the conductor. Its standard input has what rank 0 found out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import convert

from slurm_rlhf.cli import plan
from slurm_rlhf.cli.commands import Arguments, commands
from slurm_rlhf.cli.main import guarded
from slurm_rlhf.cli.preflight import OFF, before_run, question, show, steps_of, tell
from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.resources import memory_of, memory_on, node_name
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.check import check, check_stage
from slurm_rlhf.config.keys import all_keys, changed_keys, key_of
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.pipeline import COMMANDS, TRAIN
from slurm_rlhf.config.roles import of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.config.text import listed, split_overrides
from slurm_rlhf.config.user_data import fetch_models
from slurm_rlhf.errors import ConfigError, SlurmRlhfError, printable
from slurm_rlhf.nodes.examination import examine_nodes
from slurm_rlhf.nodes.launcher import Launcher
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
from slurm_rlhf.nodes.requeue import continuation_of
from slurm_rlhf.placement.rank_map import RankMap, draw
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.run_directory import RunDirectory

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_steps import AgentServer, AgentSteps


def train(arguments: Arguments) -> int:
    """Train, or with --dry_run print what would run. Raises SlurmRlhfError."""
    start = launched(os.environ)
    if start is not None:
        return lead_or_follow(arguments, start)
    refuse_unread_keys(arguments)
    config = load_config(arguments.files, arguments.overrides)
    if "dry_run" in arguments.options:
        from slurm_rlhf.cli.check import looked

        check(config)
        layout = plan.draw_layout(config)
        memory = memory_on(config, plan.layout_somewhere(config))
        plan.print_resolved(config, layout, memory, looked(config))
        plan.require_fit(memory)
        return 0
    fetch_models(config, _say)
    return train_here(config)


def refuse_unread_keys(arguments: Arguments) -> None:
    """Raise ConfigError for a key on the command line that the command does not read."""
    for name, _ in split_overrides(arguments.overrides)[0]:
        key = key_of(name)
        if key is not None and not listed(key, arguments.command.keys):
            group = name.partition(".")[0]
            own = f" (it is a key of `slurm-rlhf {group}`)" if group in commands() else ""
            raise ConfigError(f"--{name} is not read by `slurm-rlhf {arguments.command.name}`{own}: leave it out")


def read_by(names: Iterable[str]) -> set[str]:
    """Return the keys and groups that a file for the commands `names` may set; it may be for other stages, too."""
    return {key for name in names for key in commands()[name].keys} | {"run_dir", *COMMANDS} - {TRAIN}


def unread(config: Config, read: Collection[str]) -> list[str]:
    """List the keys that are set and are not among those that are `read`."""
    return [key for key in changed_keys(config) if not listed(all_keys()[key], read)]


def train_here(config: Config, command: str = TRAIN) -> int:
    """Train in the allocation of this process, or on its machine; return the exit code. Raises SlurmRlhfError.

    `command`: `train`, or a stage, whose configuration is checked.
    """
    if command == TRAIN:
        check(config)
    placed = of_command(config, command)
    ranks = plan.layout_here(placed)
    config = plan.check_memory(config, ranks, command)
    run_dir = Path(placed.run_dir)
    with steps_of(placed, run_dir) as steps:
        ranks, unfit = before_run(placed, ranks, steps)
        return led(config, command, ranks, launcher_on(run_dir, ranks, unfit, steps))


def led(config: Config, command: str, ranks: RankMap, launcher: Launcher) -> int:
    """Lead a run of `command` on `ranks` to its end; return the exit code. Raises SlurmRlhfError."""
    if command in STAGES:
        from slurm_rlhf.stages.launch import launch

        return launch(config, command, ranks, launcher)
    from slurm_rlhf.run.conductor import lead_run

    continuation = continuation_of(config.slurm, Path(config.run_dir), os.environ)
    return lead_run(config, ranks, launcher, node_name(), continuation)


def launcher_on(run_dir: Path, ranks: RankMap, unfit: Mapping[str, str], steps: AgentSteps) -> Launcher:
    """Make the launcher of the nodes, and in a Slurm job say where it runs."""
    from slurm_rlhf.nodes.agent_launcher import AgentLauncher

    if steps.slurm is not None:
        nodes, job = ranks.used_nodes, steps.slurm.job_id
        print(f"job {job} on {', '.join(nodes[:8])}{' ...' if len(nodes) > 8 else ''}, run directory {run_dir}")
        print(f"to look inside: {attach_line(str(job), nodes[0])}", flush=True)
    return AgentLauncher(steps, ranks, unfit)


def _say(text: str) -> None:
    print(text, flush=True)


def stage(arguments: Arguments) -> int:
    """Train on examples or preferences, and write the model. Raises SlurmRlhfError."""
    name, by_torchrun = arguments.command.name, "RANK" in os.environ
    if not by_torchrun and (start := launched(os.environ)) is not None:
        return lead_or_follow(arguments, start)
    config = stage_config(arguments)
    several = config.actor.num_nodes * config.actor.num_gpus_per_node > 1
    if not by_torchrun and (several or read_slurm(os.environ) is not None):
        return train_here(config, name)
    placed = of_command(config, name)
    if not by_torchrun:
        config = plan.check_memory(config, plan.layout_here(placed), name)
    from slurm_rlhf.groups.run_lock import occupied
    from slurm_rlhf.nodes.environment import WAITING_THREADS

    for variable, value in WAITING_THREADS.items():
        os.environ.setdefault(variable, value)  # before torch is imported, which starts the threads
    from slurm_rlhf.stages.stage import train_stage

    directory = RunDirectory(Path(placed.run_dir))
    with nullcontext() if by_torchrun else occupied(directory, node_name(), None, 0.0):
        return train_stage(config, name)


def stage_config(arguments: Arguments) -> Config:
    """Read and check the configuration of a stage, and print what is odd about it. Raises SlurmRlhfError."""
    name = arguments.command.name
    refuse_unread_keys(arguments)
    config = load_config(arguments.files, arguments.overrides)
    fetch_models(config, _say)
    check_stage(config, name)
    if ignored := unread(config, read_by([name])):
        _say(f"note: `slurm-rlhf {name}` does not read {', '.join(ignored)}")
    return config


def submit(arguments: Arguments) -> int:
    """Submit a job that trains. Raises SlurmRlhfError."""
    name = plan.training_command(arguments)
    arguments = replace(arguments, command=commands()[name])
    if name in STAGES:
        config = stage_config(arguments)
    else:
        refuse_unread_keys(arguments)
        config = load_config(arguments.files, arguments.overrides)
        fetch_models(config, _say)
    plan.require_fit(memory_of(config, None, name))  # if train.gpu names the GPUs: fail now, not after the queue
    from slurm_rlhf.nodes.submitit_job import submit as submit_job

    job = submit_job(config, "local" in arguments.options, name)
    print(f"{'process' if 'local' in arguments.options else 'job'} {job.job_id}, output in {job.paths.stdout}")
    print(f"`slurm-rlhf status {of_command(config, name).run_dir}` shows its progress")
    return 0


EXAMINE = "preflight"
NO_RECOVERY = "no role can be restarted alone: if a rank fails the run ends, and the same command resumes it"


def lead_or_follow(arguments: Arguments, start: Launched) -> int:
    """Train, or examine the nodes and print the report; return the exit code on rank 0, and 0 on the other ranks.

    Raises SlurmRlhfError.
    """
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
        from slurm_rlhf.cli.check import looked

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
    conductor = [sys.executable, "-m", "slurm_rlhf.cli.train"]
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

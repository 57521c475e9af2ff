"""Start training: `slurm-rlhf train` and the stages (`sft`, `rm`, `dpo`) here, `submit` as a Slurm job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rlhf.cli import plan
from slurm_rlhf.cli.check import looked
from slurm_rlhf.cli.commands import Arguments, commands, read_by, refuse_unread_keys, unread
from slurm_rlhf.cli.preflight import before_run, steps_of
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.resources import memory_of, memory_on, node_name
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.check import check, check_stage
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.pipeline import TRAIN
from slurm_rlhf.config.roles import of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.config.user_data import fetch_models
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.nodes.requeue import continuation_of
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import RunDirectory

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_steps import AgentSteps


def train(arguments: Arguments) -> int:
    """Train, or with --dry_run print what would run. Raises SlurmRlhfError."""
    refuse_unread_keys(arguments)
    config = load_config(arguments.files, arguments.overrides)
    if "dry_run" in arguments.options:
        check(config)
        layout = plan.draw_layout(config)
        memory = memory_on(config, plan.layout_somewhere(config))
        plan.print_resolved(config, layout, memory, looked(config))
        plan.require_fit(memory)
        return 0
    fetch_models(config, _say)
    return train_here(config)


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

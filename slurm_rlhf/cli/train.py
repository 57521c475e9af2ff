"""Start training: `slurm-rlhf train` and `sft` here, `submit` as a Slurm job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rlhf.cli.main import Arguments, Command, parse
from slurm_rlhf.cli.plan import (
    check_memory,
    draw_layout,
    layout_here,
    layout_somewhere,
    print_resolved,
    require_fit,
)
from slurm_rlhf.cli.preflight import before_run, steps_of
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.resources import memory_of, memory_on
from slurm_rlhf.config.check import check, check_sft, warnings
from slurm_rlhf.config.hub import fetch_models
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import split_overrides
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.nodes.launcher import Launcher, LocalLauncher
from slurm_rlhf.nodes.mpi.assignment import launched
from slurm_rlhf.placement.rank_map import RankMap

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_steps import AgentSteps

USAGE = "usage: slurm-rlhf train FILE.toml [FILE.toml ...] [--KEY=VALUE ...] [--dry_run]"
FLAGS = {"dry_run": "print the resolved configuration, the rank map and the memory (as TOML comments); start nothing"}
SFT_USAGE = "usage: slurm-rlhf sft FILE.toml [FILE.toml ...] [--KEY=VALUE ...]"
SUBMIT_USAGE = "usage: slurm-rlhf submit FILE.toml [FILE.toml ...] [--KEY=VALUE ...] [--local]"
SUBMIT_FLAGS = {"local": "run it on this machine instead, as a process that goes on after this command has ended"}
GROUPS = [field.name for field in fields(Config)]
OTHER_COMMANDS = ("sft", "generate")
"""Commands with a group of keys of their own."""


def train(words: list[str]) -> int:
    """Train, or with --dry_run print what would run. Raises SlurmRlhfError."""
    if not words:
        raise ConfigError(
            "train needs a TOML file: `slurm-rlhf init NAME` writes one for this cluster, with a reward function; "
            f"`slurm-rlhf docs first_run` shows a run on CPUs that needs no files\n{USAGE}"
        )
    arguments = parse(words, USAGE, FLAGS)
    start = launched(os.environ)
    if start is not None:
        from slurm_rlhf.cli import mpi_start

        return mpi_start.train(arguments, start)
    refuse_foreign_keys(arguments.overrides)
    if "dry_run" in arguments.flags:
        config = load_config(arguments.files, arguments.overrides)
        from slurm_rlhf.cli.check import look, read

        check(config)
        layout = draw_layout(config)
        memory = memory_on(config, layout_somewhere(config))
        print_resolved(config, layout, memory, look(config, read(config)))
        require_fit(config, memory)
        return 0
    config = configured(arguments)
    fetch_models(config, _say)
    return train_here(config)


def configured(arguments: Arguments) -> Config:
    """Read the configuration of a command, and print a note about keys that its command line gives twice."""
    config = load_config(arguments.files, arguments.overrides)
    for note in given_twice(arguments.overrides):
        _say(note)
    return config


def refuse_foreign_keys(overrides: list[str]) -> None:
    """Raise ConfigError for a key of another command on the command line of a training run."""
    for name, _ in split_overrides(overrides)[0]:
        command = name.partition(".")[0]
        if command in OTHER_COMMANDS and "." in name:
            raise ConfigError(
                f"--{name} is a key of `slurm-rlhf {command}`, and training does not use it: leave it out"
            )


def given_twice(overrides: list[str]) -> list[str]:
    """Write a note for each key that the command line gives several times: which value counts."""
    values: dict[str, list[str]] = {}
    for name, words in split_overrides(overrides)[0]:
        values.setdefault(name, []).append(" ".join(words))
    return [
        f"note: --{name} is given {len(given)} times; the last one counts: {given[-1]}"
        for name, given in values.items()
        if len(given) > 1
    ]


def train_here(config: Config) -> int:
    """Train in the allocation of this process, or on its machine; return the exit code. Raises SlurmRlhfError."""
    check(config)
    ranks = layout_here(config)
    check_memory(config, ranks)
    run_dir = Path(config.run_dir)
    with steps_of(config, run_dir) as steps:
        ranks, unfit = before_run(config, ranks, steps)
        from slurm_rlhf.run import conductor

        return conductor.run_here(config, ranks, launcher_on(run_dir, ranks, unfit, steps))


def launcher_on(run_dir: Path, ranks: RankMap, unfit: Mapping[str, str], steps: AgentSteps | None) -> Launcher:
    """Make the launcher of the nodes: srun steps in a Slurm allocation, else child processes."""
    if steps is None:
        return LocalLauncher(run_dir, ranks)
    from slurm_rlhf.nodes.slurm import SlurmLauncher

    nodes, job = ranks.used_nodes, steps.slurm.job_id
    print(f"job {job} on {', '.join(nodes[:8])}{' ...' if len(nodes) > 8 else ''}, run directory {run_dir}")
    print(f"to look inside: {attach_line(str(job), nodes[0])}", flush=True)
    return SlurmLauncher(steps, ranks, unfit)


def _say(text: str) -> None:
    print(text, flush=True)


def sft(words: list[str]) -> int:
    """Train on examples and write the model. Raises SlurmRlhfError."""
    arguments = parse(words, SFT_USAGE)
    config = configured(arguments)
    fetch_models(config, _say)
    check_sft(config)
    for text in warnings(config):
        _say(f"warning: {text}")
    from slurm_rlhf.groups.role_environment import WAITING_THREADS

    for name, value in WAITING_THREADS.items():
        os.environ.setdefault(name, value)  # before torch is imported, which starts the threads
    from slurm_rlhf.trainer.sft import fine_tune

    return fine_tune(config)


def submit(words: list[str]) -> int:
    """Submit a job that trains. Raises SlurmRlhfError."""
    arguments = parse(words, SUBMIT_USAGE, SUBMIT_FLAGS)
    refuse_foreign_keys(arguments.overrides)
    config = configured(arguments)
    fetch_models(config, _say)
    require_fit(config, memory_of(config, None))  # if train.gpu names the GPUs: fail now, not after the queue
    from slurm_rlhf.nodes import submit as submit_job

    job = submit_job(config, local="local" in arguments.flags)
    print(f"{'process' if 'local' in arguments.flags else 'job'} {job.job_id}, output in {job.paths.stdout}")
    print(f"`slurm-rlhf status {config.run_dir}` shows its progress")
    return 0


COMMANDS = {
    "train": Command(
        USAGE,
        "Trains a policy by PPO or another algorithm (algo.advantage.estimator): starts the roles that it needs as "
        "separate process groups, and puts all files of the run into run_dir. Started again, it resumes from the "
        "newest checkpoint.",
        train,
        FLAGS,
        [group for group in GROUPS if group not in OTHER_COMMANDS],
    ),
    "sft": Command(
        SFT_USAGE,
        "Trains actor.model_name_or_path on the examples in sft.dataset (data.input_key, data.output_key) and writes a "
        "Hugging Face model with its tokenizer to sft.output_dir. Metrics and a log are in <sft.output_dir>.run, with "
        "the checkpoint from which it goes on when started again, also after SIGTERM or Ctrl-C. Runs in one process; "
        "torchrun starts several.",
        sft,
        keys=["sft", "resume", "data", "actor", "ds", "train", "timeout"],
    ),
    "submit": Command(
        SUBMIT_USAGE,
        "Submits a run to Slurm with the options of the group slurm, and prints the job's number. The job saves "
        "and requeues itself when it is preempted or its time is up. In Python: slurm_rlhf.submit(config), "
        "which returns a submitit job.",
        submit,
        SUBMIT_FLAGS,
        ["slurm", *(group for group in GROUPS if group not in (*OTHER_COMMANDS, "slurm"))],
    ),
}

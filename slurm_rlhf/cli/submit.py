"""`slurm-rlhf submit`: the same as `train`, as a job that submitit submits."""

from __future__ import annotations

from dataclasses import fields

from slurm_rlhf.cli.arguments import page, parse
from slurm_rlhf.cli.memory import memory_of, refuse
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config

USAGE = "usage: slurm-rlhf submit FILE.toml [--KEY=VALUE ...] [--local]"
ABOUT = (
    "Submits a PPO run to Slurm with the options of the group slurm, and prints its job. It saves and requeues itself "
    "when it is preempted or its time is up. In Python: slurm_rlhf.submit(config), which returns a submitit job."
)
FLAGS = {"local": "run it on this machine instead, as a process that goes on when this command has ended"}
GROUPS = ["slurm", *(field.name for field in fields(Config) if field.name not in ("sft", "slurm"))]


def help_page() -> str:
    """All of `slurm-rlhf submit --help`."""
    return page(USAGE, ABOUT, GROUPS, FLAGS)


def run(words: list[str]) -> int:
    """Submits. Raises SlurmRlhfError."""
    arguments = parse(words, USAGE, FLAGS)
    config = load_config(arguments.file, arguments.overrides)
    refuse(config, memory_of(config, None))  # where train.gpu says on what: better now than after a day in the queue
    from slurm_rlhf.launch import submit

    job = submit(config, local="local" in arguments.flags)
    print(f"{'process' if 'local' in arguments.flags else 'job'} {job.job_id}, output in {job.paths.stdout}")
    print(f"`slurm-rlhf status {config.run_dir}` shows where it stands")
    return 0

"""Run `slurm-rlhf preflight FILE.toml`: look at the nodes a run would start on. `train` does the same by itself."""

from __future__ import annotations

import os
from dataclasses import fields

from slurm_rlhf.cli.examine import examine, show
from slurm_rlhf.cli.main import Command, parse
from slurm_rlhf.cli.placement_report import layout_here
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.nodes.mpi.assignment import launched

USAGE = "usage: slurm-rlhf preflight FILE.toml [FILE.toml ...] [--KEY=VALUE ...] [--json]"
FLAGS = {"json": "print one object instead of a table"}


def run(words: list[str]) -> int:
    """Look at the nodes and print what is found. Raises UserError for a configuration that cannot run anywhere."""
    arguments = parse(words, USAGE, FLAGS)
    start = launched(os.environ)
    if start is not None:
        from slurm_rlhf.cli import mpi_start

        return mpi_start.preflight(arguments, start)
    config = load_config(arguments.files, arguments.overrides)
    check(config)
    return show(examine(config, layout_here(config), full=True).report, "json" in arguments.flags)


COMMANDS = {
    "preflight": Command(
        USAGE,
        "Looks at the nodes of the allocation, or at this machine, as a run would use them, in a minute at most and "
        "without loading a model: names, networks, clocks, packages, directories, disk space, /dev/shm, limits, GPUs, "
        "the links between nodes, and every process group of the run. Names the node or pair that is bad, and "
        "what to do about it. Exit code 0: all is well; 3: warnings; 2: a run would not start.",
        run,
        FLAGS,
        keys=[field.name for field in fields(Config) if field.name != "sft"],
    ),
}

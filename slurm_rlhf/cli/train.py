"""`slurm-rlhf train`: PPO from a TOML file."""

from __future__ import annotations

import os
import textwrap
from dataclasses import fields
from pathlib import Path

from slurm_rlhf.cli.arguments import page, parse
from slurm_rlhf.cli.layout import draw_layout, layout_here, layout_somewhere
from slurm_rlhf.cli.memory import draw_memory, insist_on_memory, memory_on, refuse
from slurm_rlhf.cluster.environment import read_slurm
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.session import attach_line
from slurm_rlhf.config.check import check
from slurm_rlhf.config.dump import dump_toml
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.launch.launcher import Launcher
from slurm_rlhf.launch.mpi.environment import launched
from slurm_rlhf.placement.rank_map_file import RankMap

USAGE = "usage: slurm-rlhf train FILE.toml [--KEY=VALUE ...] [--dry_run]"
ABOUT = (
    "Trains a policy by PPO: starts actor, critic, reference and rollout as process groups of their own, and puts "
    "everything of the run into run_dir. Started again, it goes on from the newest checkpoint."
)
FLAGS = {"dry_run": "print the resolved configuration, rank map and memory (as TOML and its comments), start nothing"}
GROUPS = [field.name for field in fields(Config) if field.name != "sft"]


def help_page() -> str:
    """All of `slurm-rlhf train --help`."""
    return page(USAGE, ABOUT, GROUPS, FLAGS)


def run(words: list[str]) -> int:
    """Trains, or with --dry_run prints what would run. Raises SlurmRlhfError."""
    arguments = parse(words, USAGE, FLAGS)
    start = launched(os.environ)
    if start is not None:
        from slurm_rlhf.cli import mpi_start as mpi

        return mpi.train(arguments, start)
    config = load_config(arguments.file, arguments.overrides)
    if "dry_run" in arguments.flags:
        check(config)
        layout = draw_layout(config)
        memory = memory_on(config, layout_somewhere(config))
        print(dump_toml(config))
        print(textwrap.indent(f"{layout}\n\n{draw_memory(config, memory)}", "# ", lambda line: True), flush=True)
        refuse(config, memory)
        return 0
    return train_here(config)


def train_here(config: Config) -> int:
    """Train with `config` in the allocation or on the machine of this process; the exit code. Raises SlurmRlhfError."""
    check(config)
    ranks = layout_here(config)
    insist_on_memory(config, ranks)
    from slurm_rlhf.controller import conductor
    from slurm_rlhf.launch.job_chain import continuation_of

    launcher = _launcher(config, ranks)
    return conductor.run(
        config, ranks, launcher, node_name(), continuation_of(config.slurm, Path(config.run_dir), os.environ)
    )


def _launcher(config: Config, ranks: RankMap) -> Launcher:
    """srun in a Slurm allocation, after a look at its nodes; subprocesses elsewhere."""
    from slurm_rlhf.launch.accelerators import Wanted
    from slurm_rlhf.launch.preflight import check_here, check_nodes

    slurm, run_dir, wanted = read_slurm(os.environ), Path(config.run_dir), Wanted.by(ranks, config)
    if slurm is None:
        from slurm_rlhf.launch.local import LocalLauncher

        _say(check_here(wanted, os.environ))
        return LocalLauncher(run_dir, ranks)
    from slurm_rlhf.launch.container import container_of
    from slurm_rlhf.launch.slurm import SlurmLauncher, used_nodes

    nodes = used_nodes(ranks)
    container = container_of(config)
    gpus = [ranks.topology.node(node).gpus for node in nodes] if wanted.slots else []
    _say(check_nodes(run_dir, nodes, container, wanted, gpus))
    print(f"job {slurm.job_id} on {', '.join(nodes[:8])}{' ...' if len(nodes) > 8 else ''}, run directory {run_dir}")
    print(f"to look inside: {attach_line(str(slurm.job_id), nodes[0])}", flush=True)
    return SlurmLauncher(run_dir, ranks, slurm, container)


def _say(notes: list[str]) -> None:
    for note in notes:
        print(note, flush=True)

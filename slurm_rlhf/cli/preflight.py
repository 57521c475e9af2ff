"""Run `slurm-rlhf preflight FILE.toml`: look at the nodes a run would start on. `train` does the same by itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from slurm_rlhf.cli.main import Command, parse
from slurm_rlhf.cli.placement_report import layout_here
from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.disk import run_directory_kept
from slurm_rlhf.launch.mpi.assignment import launched
from slurm_rlhf.launch.probe import versions
from slurm_rlhf.launch.srun import HOST, container_of
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.preflight.examination import Answer, Examination, Question, look_here
from slurm_rlhf.preflight.needs import Needs, needs_of
from slurm_rlhf.preflight.report import FAILED, OK, WARNING, Report, draw
from slurm_rlhf.preflight.starters import by_srun, here

USAGE = "usage: slurm-rlhf preflight FILE.toml [FILE.toml ...] [--KEY=VALUE ...] [--json]"
FLAGS = {"json": "print one object instead of a table"}
EXIT_CODES = {OK: 0, WARNING: 3, FAILED: 2}
QUICK, OFF = "quick", "off"


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


def show(report: Report, as_json: bool) -> int:
    """Print a report; the exit code tells the verdict."""
    print(json.dumps(report.to_json()) if as_json else draw(report), flush=True)
    return EXIT_CODES[report.verdict]


def before_run(config: Config, ranks: RankMap) -> tuple[RankMap, dict[str, str]]:
    """Look at the nodes before a run, tell what its user should know, and return the rank map to take.

    It differs from `ranks` where a spare stands in for a bad node. Beside it: the bad nodes that have no ranks, and
    what is wrong with each. Raises PlacementError if the run cannot start.
    """
    if config.preflight == OFF:
        return ranks, {}
    answer = examine(config, ranks)
    tell(answer.report)
    return answer.ranks, answer.report.unfit()


def tell(report: Report) -> None:
    """Print what the user of a run should know. Raises PlacementError if the run cannot start."""
    report.require()
    for note in report.notes():
        print(note, flush=True)
    if len(report.nodes) > 1:
        count, nodes = len(report.checks), len(report.nodes)
        print(f"preflight: {count} checks of {nodes} nodes in {report.seconds:.1f} s", flush=True)


def examine(config: Config, ranks: RankMap, full: bool = False) -> Answer:
    """Look at the nodes of the allocation, or at this machine. `full`: with links and groups, whatever `preflight` is.

    Blocks for `timeout.preflight` at most, and a few seconds to end what it started. Raises RunError, and DiskError
    for a run directory that cannot be written.
    """
    with run_directory_kept(Path(config.run_dir)):
        return _examine(config, ranks, full)


def _examine(config: Config, ranks: RankMap, full: bool) -> Answer:
    slurm = read_slurm(os.environ)
    if slurm is None:
        asked = local_question(config, ranks)
        if not full:
            return Answer(look_here(asked, os.environ), ranks)
        return Examination(asked, here()).run()
    asked = _slurm_question(config, ranks, slurm, full)
    container = container_of(config)
    on_gpus = bool(asked.needs.wanted.slots)
    known = (
        {node.name: node.gpus for node in layout_here(config, nodes=slurm.job_nodes).topology.nodes} if on_gpus else {}
    )
    return Examination(
        asked, by_srun(asked.nodes, container, [known[node] for node in asked.nodes] if known else ())
    ).run()


def local_question(
    config: Config, ranks: RankMap, granted_by: str = "start it where nvidia-smi shows GPUs"
) -> Question:
    """Ask about this machine alone."""
    node = ranks.topology.nodes[0].name
    return Question(
        nodes=(node,),
        here=node_name(),
        address="127.0.0.1",
        needs=_needs(config, ranks, None, granted_by),
        versions=versions(),
        ranks=ranks,
        place=lambda nodes: ranks,
        started=sys.executable,
        limit_s=config.timeout.preflight,
    )


def _slurm_question(config: Config, ranks: RankMap, slurm: SlurmEnvironment, full: bool) -> Question:
    used = [node.name for node in ranks.topology.nodes if any(_on(ranks, node.name))]
    nodes: Sequence[str] = slurm.job_nodes if config.cluster.spares else used
    own = node_name()
    elsewhere = next((node for node in nodes if node != own), None)
    container = container_of(config)
    return Question(
        nodes=tuple(nodes),
        here=own,
        address=address_towards(elsewhere) if elsewhere else "127.0.0.1",
        needs=_for_spares(_needs(config, ranks, slurm, "ask for them with sbatch --gpus-per-node"), nodes),
        versions=versions(),
        ranks=ranks,
        place=lambda names: layout_here(config, nodes=names),
        spares=config.cluster.spares,
        thorough=full,
        measure=full or (config.preflight != QUICK and len(nodes) > 1),
        inside=container != HOST,
        job=str(slurm.job_id),
        started=" ".join(container.command("...", gpus=False)[:-2]),
        limit_s=config.timeout.preflight,
    )


def _on(ranks: RankMap, node: str) -> list[str]:
    return [role for role, shares in ranks.roles.items() if any(share.node == node for share in shares)]


def _needs(config: Config, ranks: RankMap, slurm: SlurmEnvironment | None, granted_by: str) -> Needs:
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    return needs_of(config, ranks, slurm, granted_by)


def _for_spares(needs: Needs, nodes: Sequence[str]) -> Needs:
    """Want of spare nodes what is wanted of the others: they may have to take over."""
    slots = needs.wanted.slots
    if not slots:
        return needs
    return replace(needs, wanted=replace(needs.wanted, slots={**dict.fromkeys(nodes, max(slots.values())), **slots}))


COMMANDS = {
    "preflight": Command(
        USAGE,
        "Looks at the nodes of the allocation, or at this machine, as a run would use them, in a minute at most and "
        "without loading a model: names, networks, clocks, packages, directories, disk space, /dev/shm, limits, ports, "
        "GPUs, the links between nodes, and every process group of the run. Names the node or pair that is bad, and "
        "what to do about it. Exit code 0: all is well; 3: warnings; 2: a run would not start.",
        run,
        FLAGS,
        keys=[field.name for field in fields(Config) if field.name != "sft"],
    ),
}

"""Examine the nodes of a run: for `slurm-rlhf preflight FILE.toml`, and before `slurm-rlhf train` starts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cli.plan import layout_here
from slurm_rlhf.cluster.resources import node_name, nodes_here
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import printable
from slurm_rlhf.nodes.examination import Question, examine_nodes
from slurm_rlhf.nodes.needs import Needs, needs_of
from slurm_rlhf.nodes.node_look import versions
from slurm_rlhf.nodes.report import FAILED, OK, WARNING, Report, draw
from slurm_rlhf.nodes.srun import HOST, container_of
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import run_directory_kept

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_steps import AgentSteps

EXIT_CODES = {OK: 0, WARNING: 3, FAILED: 2}
QUICK, OFF = "quick", "off"


def show(report: Report, as_json: bool) -> int:
    """Print a report, and return the exit code of its verdict."""
    print(json.dumps(report.to_json()) if as_json else printable(draw(report)), flush=True)
    return EXIT_CODES[report.verdict]


@contextmanager
def steps_of(config: Config, run_dir: Path) -> Iterator[AgentSteps]:
    """Yield what starts the steps of a run in the Slurm job of this process, or on this machine.

    Raises PlacementError.
    """
    from slurm_rlhf.nodes.agent_steps import AgentSteps, LocalAgents

    slurm, topology = read_slurm(os.environ), nodes_here(os.environ)
    with run_directory_kept(run_dir):
        steps: AgentSteps = (
            AgentSteps(run_dir, slurm, topology, container_of(config), config.timeout, config.reward.workers_num_nodes)
            if slurm
            else LocalAgents(run_dir, topology, config.timeout)
        )
    with closing(steps):
        yield steps


def before_run(config: Config, ranks: RankMap, steps: AgentSteps) -> tuple[RankMap, dict[str, str]]:
    """Examine the nodes before a run, and return the rank map to use and the bad nodes with their problems.

    The rank map differs from `ranks` if spares replace bad nodes. Raises PlacementError if the run cannot start.
    """
    if config.preflight == OFF:
        steps.begin(steps.orders())
        return ranks, {}
    report, ranks = examine(config, ranks, steps)
    tell(report)
    return ranks, report.unfit()


def tell(report: Report) -> None:
    """Print the warnings of a report. Raises PlacementError if the run cannot start."""
    report.require()
    for note in report.notes():
        print(printable(note), flush=True)
    if len(report.nodes) > 1:
        count, nodes = len(report.checks), len(report.nodes)
        print(f"preflight: {count} checks of {nodes} nodes in {report.seconds:.1f} s", flush=True)


def examine(config: Config, ranks: RankMap, steps: AgentSteps, full: bool = False) -> tuple[Report, RankMap]:
    """Examine the nodes of the allocation, or this machine. `full`: also links and groups, whatever `preflight` is.

    Blocks for at most `timeout.preflight` and a few seconds; the agents of `steps` stay. Raises RunError, and DiskError
    for a run directory that cannot be written.
    """
    with run_directory_kept(Path(config.run_dir)):
        if steps.slurm is None:
            needs = needs_of(config, ranks, "start it where nvidia-smi shows GPUs")
            return examine_nodes(question(config, ranks, needs, [ranks.topology.nodes[0].name], full=full), steps)
        spares, workers = config.cluster.spares, ranks.topology.workers
        nodes: Sequence[str] = steps.slurm.job_nodes if spares else (*ranks.used_nodes, *workers)
        needs = needs_of(config, ranks, "ask for them with sbatch --gpus-per-node")
        if slots := needs.wanted.slots:  # spare nodes may have to replace others
            every = dict.fromkeys([node for node in nodes if node not in workers], max(slots.values()))
            needs = replace(needs, wanted=replace(needs.wanted, slots={**every, **slots}))
        asked = question(config, ranks, needs, nodes, steps.slurm, full)
        place = partial(layout_here, config, os.environ)
        return examine_nodes(replace(asked, place=place, spares=spares, thorough=full), steps)


def question(
    config: Config,
    ranks: RankMap,
    needs: Needs,
    nodes: Sequence[str],
    slurm: SlurmEnvironment | None = None,
    full: bool = False,
) -> Question:
    """Say what is asked of `nodes`: some of the job or, without a job, this machine. `full`: see `examine`."""
    container = container_of(config)
    return Question(
        nodes=tuple(nodes),
        here=node_name(),
        needs=needs,
        versions=versions(),
        ranks=ranks,
        place=lambda names: ranks,
        measure=full or (config.preflight != QUICK and len(nodes) > 1),
        inside=slurm is not None and container != HOST,
        started=sys.executable if slurm is None else " ".join(container.command("...", gpus=False)[:-2]),
        limit_s=config.timeout.preflight,
    )


def preflight(arguments: Arguments) -> int:
    """Examine the nodes and print the report. Raises UserError for a configuration that cannot run anywhere."""
    config = load_config(arguments.files, arguments.overrides)
    check(config)
    with steps_of(config, Path(config.run_dir)) as steps:
        report, _ = examine(config, layout_here(config), steps, full=True)
        return show(report, "json" in arguments.options)

"""Look at the nodes of a run before it starts: what is asked of them, and what its user is told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurm_rlhf.cli.placement_report import layout_here
from slurm_rlhf.cluster.network import LOOPBACK, address_among
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.config.schema import Config
from slurm_rlhf.disk import run_directory_kept
from slurm_rlhf.errors import printable
from slurm_rlhf.nodes.examination import Answer, Examination, Question, look_here
from slurm_rlhf.nodes.needs import Needs, needs_of
from slurm_rlhf.nodes.node_look import versions
from slurm_rlhf.nodes.report import FAILED, OK, WARNING, Report, draw
from slurm_rlhf.nodes.srun import HOST, container_of
from slurm_rlhf.nodes.starters import by_srun, here
from slurm_rlhf.placement.rank_map import RankMap

EXIT_CODES = {OK: 0, WARNING: 3, FAILED: 2}
QUICK, OFF = "quick", "off"


def show(report: Report, as_json: bool) -> int:
    """Print a report; the exit code tells the verdict."""
    print(json.dumps(report.to_json()) if as_json else printable(draw(report)), flush=True)
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
        print(printable(note), flush=True)
    if len(report.nodes) > 1:
        count, nodes = len(report.checks), len(report.nodes)
        print(f"preflight: {count} checks of {nodes} nodes in {report.seconds:.1f} s", flush=True)


def examine(config: Config, ranks: RankMap, full: bool = False) -> Answer:
    """Look at the nodes of the allocation, or at this machine. `full`: with links and groups, whatever `preflight` is.

    Blocks for `timeout.preflight` at most, and a few seconds to end what it started. Raises RunError, and DiskError
    for a run directory that cannot be written.
    """
    with run_directory_kept(Path(config.run_dir)):
        slurm = read_slurm(os.environ)
        if slurm is not None:
            return _examine_allocation(config, ranks, slurm, full)
        asked = local_question(config, ranks)
        return Examination(asked, here()).run() if full else Answer(look_here(asked, os.environ), ranks)


def _examine_allocation(config: Config, ranks: RankMap, slurm: SlurmEnvironment, full: bool) -> Answer:
    spares = config.cluster.spares
    nodes: Sequence[str] = slurm.job_nodes if spares else ranks.used_nodes
    needs = _for_spares(_needs(config, ranks, slurm, "ask for them with sbatch --gpus-per-node"), nodes)
    asked = replace(
        question(config, ranks, needs, nodes, slurm),
        place=lambda names: layout_here(config, nodes=names),
        spares=spares,
        thorough=full,
        measure=full or (config.preflight != QUICK and len(nodes) > 1),
    )
    known = layout_here(config, nodes=slurm.job_nodes).topology if needs.wanted.slots else None
    gpus = [known.node(node).gpus for node in nodes] if known else ()
    return Examination(asked, by_srun(asked.nodes, container_of(config), gpus)).run()


def question(
    config: Config, ranks: RankMap, needs: Needs, nodes: Sequence[str], slurm: SlurmEnvironment | None = None
) -> Question:
    """Ask about `nodes`: by a step of the job on each, or where there is no job about this machine."""
    container, own = container_of(config), node_name()
    return Question(
        nodes=tuple(nodes),
        here=own,
        address=LOOPBACK if slurm is None else address_among(nodes, own),
        needs=needs,
        versions=versions(),
        ranks=ranks,
        place=lambda names: ranks,
        inside=slurm is not None and container != HOST,
        job="" if slurm is None else str(slurm.job_id),
        started=sys.executable if slurm is None else " ".join(container.command("...", gpus=False)[:-2]),
        limit_s=config.timeout.preflight,
    )


def local_question(
    config: Config, ranks: RankMap, granted_by: str = "start it where nvidia-smi shows GPUs"
) -> Question:
    """Ask about this machine alone."""
    return question(config, ranks, _needs(config, ranks, None, granted_by), [ranks.topology.nodes[0].name])


def _needs(config: Config, ranks: RankMap, slurm: SlurmEnvironment | None, granted_by: str) -> Needs:
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    return needs_of(config, ranks, slurm, granted_by)


def _for_spares(needs: Needs, nodes: Sequence[str]) -> Needs:
    """Want of spare nodes what is wanted of the others: they may have to take over."""
    slots = needs.wanted.slots
    if not slots:
        return needs
    return replace(needs, wanted=replace(needs.wanted, slots={**dict.fromkeys(nodes, max(slots.values())), **slots}))

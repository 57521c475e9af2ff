"""The steps of a job as data: which nodes, and what of them, each role gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.launch.srun import HOST, Container, Step
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU


def used_nodes(ranks: RankMap) -> list[str]:
    """Return the nodes that hold a rank, in the order of the topology."""
    return ranks.used_nodes


def role_step(
    ranks: RankMap, role: str, logs: Path, container: Container = HOST, only: Sequence[str] | None = None
) -> Step:
    """Return the step of `role`, on all of its nodes or on those in `only`.

    Engines never span nodes: the tasks of rollout do not know of each other, and the others survive when one ends.
    """
    places = [share.node for share in ranks.roles[role]]
    nodes = [ranks.topology.node(name) for name in places if only is None or name in only]
    has_gpus = ranks.topology.accelerator == GPU
    return Step(
        name=role,
        nodes=tuple(node.name for node in nodes),
        cpus=min(node.cpus for node in nodes),
        # All that the job has there: `launch.node` chooses among them, and NCCL needs to see the neighbours.
        gpus=tuple(node.gpus for node in nodes) if has_gpus else (),
        output=str(logs / f"{role}.%N.torchrun.log"),
        together=ROLES[role].kind != "engine",
        uneven=len({node.gpus for node in ranks.topology.nodes}) > 1,
        options=container.step_options(),
    )


def look_step(ranks: RankMap, names: Sequence[str], container: Container = HOST) -> Step:
    """Return a step of one task on each of the nodes `names`, beside the roles."""
    nodes = [ranks.topology.node(name) for name in names]
    uneven = len({node.gpus for node in ranks.topology.nodes}) > 1
    gpus = tuple(node.gpus for node in nodes) if uneven else ()
    return Step(
        "look", tuple(names), cpus=1, gpus=gpus, uneven=uneven, together=False, options=container.step_options()
    )

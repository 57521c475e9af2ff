"""Where the roles of a configuration go: here and now, or on nodes that are still to be allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from slurm_rlhf.cluster.environment import read_slurm
from slurm_rlhf.cluster.local import process_slots
from slurm_rlhf.cluster.resources import current_topology
from slurm_rlhf.config.roles import colocations
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.rank_plan import RankMap, place, role_sizes
from slurm_rlhf.placement.render import draw
from slurm_rlhf.placement.topology import CPU, Node, Topology, numbered_names

IMAGINED = "Not in a Slurm allocation: these nodes stand for those that sbatch --nodes={nodes} would get."


def layout_here(config: Config, environ: Mapping[str, str] = os.environ) -> RankMap:
    """The rank map of a run that starts now: on this machine, or on the nodes of the Slurm allocation it is in.

    Raises PlacementError when the roles do not fit.
    """
    colocate = colocations(config)
    return place(current_topology(config, colocate, environ), role_sizes(config), colocate)


def layout_on(config: Config, names: Sequence[str], gpus_per_node: int) -> RankMap:
    """The rank map on nodes that somebody thinks of. Raises PlacementError when the roles do not fit."""
    return place(Topology.uniform(names, gpus_per_node), role_sizes(config), colocations(config))


def layout_somewhere(config: Config, environ: Mapping[str, str] = os.environ) -> RankMap:
    """`layout_here`, but outside an allocation roles of several nodes get nodes that are only imagined."""
    nodes = _imagined(config, environ)
    if nodes == 0:
        return layout_here(config, environ)
    roles, colocate = role_sizes(config), colocations(config)
    topology = Topology(tuple(Node(name, 0) for name in numbered_names(nodes)), CPU)
    return place(process_slots(topology, roles, colocate), roles, colocate)


def draw_layout(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """The rank map of `layout_somewhere` as a grid. Raises PlacementError when the roles do not fit."""
    drawn = draw(layout_somewhere(config, environ))
    nodes = _imagined(config, environ)
    return f"{IMAGINED.format(nodes=nodes)}\n\n{drawn}" if nodes else drawn


def _imagined(config: Config, environ: Mapping[str, str]) -> int:
    """How many nodes have to be imagined; 0 where there are real ones."""
    nodes = max(size.num_nodes for size in role_sizes(config))
    return nodes if nodes > 1 and read_slurm(environ) is None else 0

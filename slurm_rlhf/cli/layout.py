"""Where the roles of a configuration go: here and now, or on nodes that are still to be allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping

from slurm_rlhf.cluster.current import current_topology
from slurm_rlhf.cluster.draw import draw
from slurm_rlhf.cluster.environment import read_slurm
from slurm_rlhf.cluster.local import process_slots
from slurm_rlhf.cluster.placement import RankMap, place, role_sizes
from slurm_rlhf.cluster.sizes import colocations
from slurm_rlhf.cluster.topology import CPU, Node, Topology, numbered_names
from slurm_rlhf.config.schema import Config

IMAGINED = "Not in a Slurm allocation: these nodes stand for those that sbatch --nodes={nodes} would get."


def layout_here(config: Config, environ: Mapping[str, str] = os.environ) -> RankMap:
    """The rank map of a run that starts now: on this machine, or on the nodes of the Slurm allocation it is in.

    Raises PlacementError when the roles do not fit.
    """
    colocate = colocations(config)
    return place(current_topology(config, colocate, environ), role_sizes(config), colocate)


def draw_layout(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """The rank map as a grid. Outside an allocation, roles of several nodes get nodes that are only imagined.

    Raises PlacementError when the roles do not fit.
    """
    roles = role_sizes(config)
    nodes = max(size.num_nodes for size in roles)
    if nodes > 1 and read_slurm(environ) is None:
        topology = Topology(tuple(Node(name, 0) for name in numbered_names(nodes)), CPU)
        ranks = place(process_slots(topology, roles), roles, colocations(config))
        return f"{IMAGINED.format(nodes=nodes)}\n\n{draw(ranks)}"
    return draw(layout_here(config, environ))

"""Where the roles of a configuration go: here and now, or on nodes that are still to be allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping

from slurm_rlhf.cluster.current import current_topology
from slurm_rlhf.cluster.draw import draw
from slurm_rlhf.cluster.environment import read_slurm
from slurm_rlhf.cluster.local import process_slots
from slurm_rlhf.cluster.placement import RankMap, place, role_sizes
from slurm_rlhf.cluster.topology import CPU, Node, Topology, numbered_names
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError

IMAGINED = "Not in a Slurm allocation: these nodes stand for those that sbatch --nodes={nodes} would get."


def layout_here(config: Config, environ: Mapping[str, str] = os.environ) -> RankMap:
    """The rank map of a run that starts now on this machine.

    Raises PlacementError when the roles do not fit, or need another node than the first of the allocation.
    """
    ranks = place(current_topology(config, environ=environ), role_sizes(config))
    first = ranks.topology.nodes[0].name
    elsewhere = sorted({share.node for shares in ranks.roles.values() for share in shares} - {first})
    if elsewhere:
        raise PlacementError(
            f"roles would run on {', '.join(elsewhere)} too, but a run is limited to one node ({first}) so far: set "
            "every num_nodes to 1 and ask for no more slots than that node has"
        )
    return ranks


def draw_layout(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """The rank map as a grid. Outside an allocation, roles of several nodes get nodes that are only imagined.

    Raises PlacementError when the roles do not fit.
    """
    roles = role_sizes(config)
    nodes = max(size.num_nodes for size in roles)
    if nodes > 1 and read_slurm(environ) is None:
        topology = Topology(tuple(Node(name, 0) for name in numbered_names(nodes)), CPU)
        return f"{IMAGINED.format(nodes=nodes)}\n\n{draw(place(process_slots(topology, roles), roles))}"
    return draw(place(current_topology(config, environ=environ), roles))

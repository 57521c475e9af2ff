"""Topologies where nobody granted GPUs: this machine alone, or an allocation of CPUs. There a slot is a process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from slurm_rlhf.cluster.devices import local_gpus
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_plan import RoleSize, make_blocks, place, role_sizes
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology


def local_topology(
    config: Config, colocate: Sequence[frozenset[str]] = (), environ: Mapping[str, str] | None = None
) -> Topology:
    """This machine: with its GPUs if it has any, else with as many process slots as the roles need.

    Raises PlacementError if roles ask for several nodes, or for more GPUs than there are.
    """
    environ = os.environ if environ is None else environ
    roles = role_sizes(config)
    several = [size for size in roles if size.num_nodes > 1]
    if several:
        keys = ", ".join(f"{size.key('num_nodes')} = {size.num_nodes}" for size in several)
        most = max(size.num_nodes for size in several)
        raise PlacementError(
            f"{keys}, but this is not a Slurm allocation and there is only this machine: set "
            f"{' and '.join(size.key('num_nodes') for size in several)} to 1, or submit with sbatch --nodes={most}"
        )
    name = socket.gethostname().partition(".")[0]
    cpus = len(os.sched_getaffinity(0))
    gpus = local_gpus(environ)
    if not gpus:
        return process_slots(Topology((Node(name, 0, cpus),), CPU), roles, colocate)
    topology = Topology((Node(name, len(gpus), cpus, gpus),), GPU)
    try:
        place(topology, roles, colocate)
    except PlacementError as error:
        raise PlacementError(
            f"{error}\n  or hide the GPUs and run on CPUs: CUDA_VISIBLE_DEVICES= slurm-rlhf ..."
        ) from error
    return topology


def process_slots(topology: Topology, roles: Sequence[RoleSize], colocate: Sequence[frozenset[str]] = ()) -> Topology:
    """`topology` without GPUs: on each node as many slots as the roles put on one node; colocated ones share theirs.

    Raises PlacementError where colocated roles differ in size.
    """
    count = len(topology.nodes)
    slots = 0
    for block in make_blocks(roles, colocate):
        engines = -(-block.engines // (block.num_nodes or count))
        slots += block.per_node or engines * block.tp
    return Topology(tuple(Node(node.name, slots, node.cpus) for node in topology.nodes), CPU)

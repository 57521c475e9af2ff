"""Put engines on all GPUs of the nodes: the rank map of a job that has engines only. Pure."""

from __future__ import annotations

from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import CPU, Node, Topology


def engines_everywhere(topology: Topology, tp: int, per_node: int = 0) -> RankMap:
    """Put `per_node` engines of `tp` neighbouring slots on each node; 0: as many as its GPUs hold.

    Nodes without GPUs have as many process slots as that takes, for one engine where `per_node` is 0. Raises
    PlacementError where a node holds fewer engines than were asked for, or none holds one.
    """
    if topology.accelerator == CPU:
        slots = (per_node or 1) * tp
        topology = Topology(tuple(Node(node.name, slots, node.cpus) for node in topology.nodes), CPU)
    shares: list[NodeShare] = []
    engines = 0
    for node in topology.nodes:
        count = node.gpus // tp
        if per_node > count:
            raise PlacementError(
                f"generate.engines_per_node = {per_node} engines of vllm.tensor_parallel_size = {tp} need "
                f"{per_node * tp} GPUs, and {node.name} has {node.gpus}: lower one of them, or set "
                "generate.engines_per_node = 0 for as many as fit"
            )
        count = per_node or count
        if count:
            slots = count * tp
            first = engines * tp
            places = tuple((engines + slot // tp, slot % tp) for slot in range(slots))
            shares.append(NodeShare(node.name, tuple(range(slots)), tuple(range(first, first + slots)), places))
            engines += count
    if not shares:
        most = max(node.gpus for node in topology.nodes)
        raise PlacementError(
            f"vllm.tensor_parallel_size = {tp}, and the largest node has {most} GPUs: an engine does not leave its "
            f"node. Use at most {most}, or ask for more GPUs with --gpus-per-node"
        )
    return RankMap(topology, {ROLLOUT: shares})

"""Choose the nodes that a run starts on, where its allocation has some to spare, and move an engine to one: pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from slurm_rlhf.errors import PlacementError, shortened
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import Topology


def chosen(nodes: Sequence[str], bad: Collection[str], failed: Collection[str], spares: int) -> list[str]:
    """Return as many nodes as a run has without its `spares`: the first in the order of the allocation that are good.

    Where too few are good, `bad` ones stay in, and `failed` ones last: what is wrong with them then ends the run.
    Raises PlacementError if the allocation has no more nodes than spares.
    """
    if spares >= len(nodes):
        raise PlacementError(
            f"cluster.spares = {spares}, but the allocation has {len(nodes)} nodes: {shortened(nodes, 4)}. Ask for as "
            "many more as are to stay in reserve (sbatch --nodes), or set cluster.spares lower"
        )
    preferred = sorted(nodes, key=lambda node: (node in failed, node in bad))
    taken = preferred[: len(nodes) - spares]
    return [node for node in nodes if node in taken]


def with_engine_on(ranks: RankMap, role: str, engine: int, node: str) -> RankMap:
    """Return the map with an engine on another node, on the first slots there that no rank has.

    A node that is not in the topology is taken to be like the engine's own. Raises PlacementError where there is no
    room.
    """
    group = next(group for group in ranks.tp_groups if (group.role, group.engine) == (role, engine))
    topology = ranks.topology
    if node not in {each.name for each in topology.nodes}:
        like = replace(topology.node(group.node), name=node)
        topology = Topology((*topology.nodes, like), topology.accelerator, topology.origin)
    width = len(group.gpus)
    taken = {slot for shares in ranks.roles.values() for share in shares if share.node == node for slot in share.gpus}
    starts = range(0, topology.node(node).gpus - width + 1, width)
    free = (slots for start in starts if not taken & set(slots := tuple(range(start, start + width))))
    gpus = next(free, None)
    if gpus is None:
        raise PlacementError(f"node {node} has no {width} free slots for engine {engine}")
    left = [_without(share, engine) for share in ranks.roles[role]]
    old = next((share for share in left if share.node == node), NodeShare(node, (), ()))
    tp_ranks = tuple((engine, tp_rank) for tp_rank in range(width))
    new = NodeShare(node, (*old.gpus, *gpus), (*old.ranks, *group.ranks), (*old.engines, *tp_ranks))
    shares = [share for share in left if share.ranks and share.node != node]
    return RankMap(topology, {**ranks.roles, role: [*shares, new]})


def _without(share: NodeShare, engine: int) -> NodeShare:
    """Take an engine out of a share."""
    kept = [place for place, (other, _) in enumerate(share.engines) if other != engine]
    gpus, ranks = tuple(share.gpus[place] for place in kept), tuple(share.ranks[place] for place in kept)
    return NodeShare(share.node, gpus, ranks, tuple(share.engines[place] for place in kept))

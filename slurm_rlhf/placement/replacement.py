"""Choose the nodes of a run where some are spare, and put ranks elsewhere when nodes or engines are gone: pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from slurm_rlhf.errors import PlacementError, shortened
from slurm_rlhf.placement.rank_map import NodeShare, RankMap, place
from slurm_rlhf.placement.role_sizes import RoleSize
from slurm_rlhf.placement.topology import CPU, Node, Topology


def replaced(
    ranks: RankMap,
    bad: Collection[str],
    allocation: Topology,
    roles: Sequence[RoleSize],
    colocate: Sequence[frozenset[str]] = (),
    unfit: Mapping[str, str] | None = None,
) -> RankMap:
    """Return a rank map without the nodes `bad`. `unfit`: nodes that take over nothing, and why.

    Where `allocation` has a free node for each of them, these take over their ranks, and all other ranks stay where
    they are. Otherwise all `roles` are placed anew on the nodes that are left, at their sizes. Raises PlacementError
    that says what is missing.
    """
    used = ranks.used_nodes
    gone = [node for node in ranks.topology.nodes if node.name in bad and node.name in used]
    free = [node for node in allocation.nodes if node.name not in {*used, *bad, *(unfit or {})}]
    stand_ins = _stand_ins(gone, free, ranks.topology.accelerator)
    if stand_ins is not None:
        return _renamed(ranks, stand_ins)
    left = tuple(node for node in (*ranks.topology.nodes, *free) if node.name not in bad)
    spares = f"no free node of the allocation can stand in for {shortened([node.name for node in gone])}"
    if unfit:
        spares += f"; {passed_over(unfit)}"
    if not left:
        raise PlacementError(f"{spares}, and no node is left. Keep one in reserve: cluster.spares")
    try:
        return place(Topology(left, ranks.topology.accelerator, ranks.topology.origin), roles, colocate)
    except PlacementError as error:
        raise PlacementError(
            f"{spares} ({len(free)} are free), and the roles do not fit the {len(left)} nodes that are left: "
            f"{error}. Keep a node in reserve: cluster.spares"
        ) from None


def passed_over(unfit: Mapping[str, str]) -> str:
    """Say which nodes are free and take over nothing, and why."""
    return "; ".join(f"{node} is free and not taken: {why}" for node, why in sorted(unfit.items()))


def _stand_ins(gone: Sequence[Node], free: Sequence[Node], accelerator: str) -> dict[str, Node] | None:
    """Choose a free node for each that is gone, the smallest that has as many slots; None: there are too few."""
    found: dict[str, Node] = {}
    left = list(free)
    for node in sorted(gone, key=lambda node: -node.gpus):
        fitting = [one for one in left if accelerator == CPU or one.gpus >= node.gpus]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda one: one.gpus)
        left.remove(chosen)
        # Without GPUs slots are processes, as many as the roles need.
        found[node.name] = replace(chosen, gpus=node.gpus) if accelerator == CPU else chosen
    return found


def _renamed(ranks: RankMap, stand_ins: dict[str, Node]) -> RankMap:
    nodes = tuple(stand_ins.get(node.name, node) for node in ranks.topology.nodes)
    roles = {
        role: [
            replace(share, node=stand_ins[share.node].name) if share.node in stand_ins else share for share in shares
        ]
        for role, shares in ranks.roles.items()
    }
    return RankMap(Topology(nodes, ranks.topology.accelerator, ranks.topology.origin), roles)


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

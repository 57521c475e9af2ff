"""Put the ranks of a run elsewhere when nodes are gone: on spare nodes of the allocation, or on those that are left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from slurm_rlhf.errors import PlacementError, shortened
from slurm_rlhf.placement.rank_map import RankMap, place
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

"""Put ranks elsewhere: on spare nodes of the allocation when nodes are gone, or on those that are left. Pure.

`chosen` picks the nodes that a run starts on, `with_engine_on` moves an engine, `replaced` makes a new rank map.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from slurm_rlhf.config.keys import changed, get
from slurm_rlhf.config.roles import ROLES, ROLLOUT, colocations, roles_by_slots, running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError, shortened
from slurm_rlhf.placement.rank_map import NodeShare, RankMap, make_blocks, place, process_slots
from slurm_rlhf.placement.topology import CPU, GPU, Node, RoleSize, Topology, role_sizes

Change = dict[str, Any]
"""Key -> value."""

MOST_LAYOUTS = 5000
"""Most smaller layouts that are tried."""

Fits = Callable[[Config], bool]
"""Tells whether the roles of a configuration fit the memory of its GPUs."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Says where the ranks go, and which keys of the configuration change."""

    ranks: RankMap
    change: Change = field(default_factory=dict)  # empty: all roles keep their sizes

    def words(self, config: Config) -> str:
        """List the keys that are smaller than in `config`, for the user; empty: none is."""
        return ", ".join(f"{key} = {value} (it was {get(config, key)})" for key, value in self.change.items())


def replaced(
    ranks: RankMap,
    bad: Collection[str],
    allocation: Topology,
    config: Config,
    fits: Fits = lambda config: True,
    unfit: Mapping[str, str] | None = None,
) -> Replacement:
    """Return a rank map without the nodes `bad`. `unfit`: free nodes that may not be used, and why.

    If `allocation` has a free node for each bad one, the free nodes take over their ranks, and all other ranks stay
    where they are. Otherwise the roles are placed on the nodes that are left: at their sizes, or at the largest smaller
    ones that fit and that the rules of the configuration allow. Engines that live stay where they are if possible.
    Raises PlacementError that says what is missing.
    """
    used = ranks.used_nodes
    gone = [node for node in ranks.topology.nodes if node.name in bad and node.name in used]
    free = [node for node in allocation.nodes if node.name not in {*used, *bad, *(unfit or {})}]
    stand_ins = _stand_ins(gone, free, ranks.topology.accelerator)
    if stand_ins is not None:
        return Replacement(_renamed(ranks, stand_ins))
    left = tuple(node for node in (*ranks.topology.nodes, *free) if node.name not in bad)
    spares = f"no free node of the allocation can stand in for {shortened([node.name for node in gone])}"
    if unfit:
        spares += f"; {passed_over(unfit)}"
    if not left:
        raise PlacementError(f"{spares}, and no node is left. Keep one in reserve: cluster.spares")
    try:
        return _on_fewer(ranks, replace(ranks.topology, nodes=left), config, fits)
    except PlacementError as error:
        names = shortened([node.name for node in left])
        raise PlacementError(
            f"{spares} ({len(free)} are free), and the roles do not fit what is left ({names}): "
            f"{error}. Keep a node in reserve: cluster.spares"
        ) from None


def passed_over(unfit: Mapping[str, str]) -> str:
    """Say which free nodes are not used, and why."""
    return "; ".join(f"{node} is free and not taken: {why}" for node, why in sorted(unfit.items()))


def _on_fewer(ranks: RankMap, left: Topology, config: Config, fits: Fits) -> Replacement:
    """Find the largest layout that fits the nodes `left`. Raises PlacementError."""
    refused = ""
    large = False  # True: a layout has enough slots, but needs more memory than the GPUs have
    sizes = group_sizes(config, len(left.nodes))
    for change in islice(smaller_layouts(sizes), MOST_LAYOUTS):
        candidate = changed(config, change)
        found = _placed(ranks, left, candidate)
        if found is not None and not (change and left.accelerator == GPU and not fits(candidate)):
            return Replacement(found, change)
        large = large or found is not None
    try:
        place(left, role_sizes(config), colocations(config))
    except PlacementError as error:
        refused = str(error)
    if large:
        raise PlacementError(f"{refused}; those layouts that would fit need more memory than a GPU has")
    least = sum(group[-1][0] for group in sizes) if all(sizes) else 0
    smallest = f": the smallest that the rules of the configuration allow needs {least} slots" if least else ""
    raise PlacementError(f"{refused}; nor does any smaller layout{smallest}")


def group_sizes(config: Config, nodes: int) -> list[list[tuple[int, Change]]]:
    """List, for each group of roles that share slots, the sizes that the rules allow on `nodes` nodes.

    A size is (slots, changed keys); the largest comes first. A rule may be that batches divide over the ranks.
    """
    found = []
    for names in roles_by_slots(config, [role.name for role in running_roles(config)]):
        sizes = []
        for slots, change in _sizes(config, names, nodes):
            new = {key: value for key, value in change.items() if get(config, key) != value}
            if not new or next(rule_problems(changed(config, new)), None) is None:
                sizes.append((slots, new))
        found.append(sorted(sizes, key=lambda size: (-size[0], len(size[1]))))
    return found


def _sizes(config: Config, names: Sequence[str], nodes: int) -> Iterator[tuple[int, Change]]:
    """Yield (slots, keys) for fewer nodes and fewer slots on each; for a group of engines alone, for fewer engines."""
    roles = [ROLES[name] for name in names]
    trainers, vllm = [role for role in roles if role.kind != "engine"], config.vllm
    if not trainers:
        for engines in range(vllm.num_engines, 0, -1):
            spread = min(vllm.num_nodes, engines, nodes)
            yield engines * vllm.tensor_parallel_size, {"vllm.num_engines": engines, "vllm.num_nodes": spread}
        return
    largest = trainers[0].settings(config)
    for count in range(min(largest.num_nodes, nodes), 0, -1):
        for per_node in range(largest.num_gpus_per_node, 0, -1):
            change: Change = {}
            for role in trainers:
                change |= {f"{role.group}.num_nodes": count, f"{role.group}.num_gpus_per_node": per_node}
            if len(trainers) < len(roles):
                change["vllm.num_engines"] = count * per_node // vllm.tensor_parallel_size
                change["vllm.num_nodes"] = count if vllm.num_nodes else 0
            yield count * per_node, change


def smaller_layouts(groups: Sequence[Sequence[tuple[int, Change]]]) -> Iterator[Change]:
    """Yield the changed keys of each layout: most slots first, and of equal ones the fewest changed groups first."""
    if not all(groups):
        return

    def entry(chosen: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        slots = sum(sizes[place][0] for sizes, place in zip(groups, chosen, strict=True))
        return -slots, sum(map(bool, chosen)), chosen

    first = (0,) * len(groups)
    queue, seen = [entry(first)], {first}
    while queue:
        _, _, chosen = heapq.heappop(queue)
        picked = (sizes[place][1] for sizes, place in zip(groups, chosen, strict=True))
        yield {key: value for change in picked for key, value in change.items()}
        for group, sizes in enumerate(groups):
            after = (*chosen[:group], chosen[group] + 1, *chosen[group + 1 :])
            if after[group] < len(sizes) and after not in seen:
                seen.add(after)
                heapq.heappush(queue, entry(after))


def _placed(ranks: RankMap, left: Topology, config: Config) -> RankMap | None:
    """Place a layout, with the engines where they are if possible; None: it does not fit."""
    sizes, colocate = role_sizes(config), colocations(config)
    if left.accelerator == GPU and sum(block.slots for block in make_blocks(sizes, colocate)) > left.slots:
        return None  # refused here, because `place` would look for the reason first
    with suppress(PlacementError):
        if (found := _around_engines(ranks, left, sizes, colocate)) is not None:
            return found
    with suppress(PlacementError):
        return place(_with_slots(left, sizes, colocate), sizes, colocate)
    return None


def _around_engines(
    ranks: RankMap, left: Topology, sizes: Sequence[RoleSize], colocate: Sequence[frozenset[str]]
) -> RankMap | None:
    """Place all other roles around the engines; None if the engines changed or the rest does not fit."""
    shares = ranks.roles.get(ROLLOUT, [])
    others = [size for size in sizes if size.role != ROLLOUT]
    same = sum(len(share.ranks) for share in shares) == sum(size.slots for size in sizes if size.role == ROLLOUT)
    names = {node.name for node in left.nodes}
    if not shares or not same or not {share.node for share in shares} <= names or any(ROLLOUT in c for c in colocate):
        return None
    taken = {share.node: set(share.gpus) for share in shares}
    if left.accelerator == CPU:
        left = replace(
            left,
            nodes=tuple(
                replace(node, gpus=max(node.gpus + len(held), *(slot + 1 for slot in held), 0))
                for node in _with_slots(left, others, colocate).nodes
                for held in [taken.get(node.name, set())]
            ),
        )
    free = {node.name: [s for s in range(node.gpus) if s not in taken.get(node.name, ())] for node in left.nodes}
    rest = replace(left, nodes=tuple(replace(node, gpus=len(free[node.name])) for node in left.nodes))
    placed = place(rest, others, colocate)
    roles = {
        role: [replace(share, gpus=tuple(free[share.node][slot] for slot in share.gpus)) for share in found]
        for role, found in placed.roles.items()
    }
    return RankMap(left, {**roles, ROLLOUT: shares})


def _with_slots(left: Topology, sizes: Sequence[RoleSize], colocate: Sequence[frozenset[str]]) -> Topology:
    """Return the topology; without GPUs its slots are processes, so it gets as many as the roles need."""
    return process_slots(left, sizes, colocate) if left.accelerator == CPU else left


def _stand_ins(gone: Sequence[Node], free: Sequence[Node], accelerator: str) -> dict[str, Node] | None:
    """Choose a free node for each node that is gone, the smallest with enough slots; None: there are too few."""
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
    names = {old: new.name for old, new in stand_ins.items()}
    roles = {
        role: [replace(share, node=names.get(share.node, share.node)) for share in shares]
        for role, shares in ranks.roles.items()
    }
    return RankMap(replace(ranks.topology, nodes=nodes), roles)


def chosen(nodes: Sequence[str], bad: Collection[str], failed: Collection[str], spares: int) -> list[str]:
    """Return the nodes that a run starts on, all but `spares` of them: the first good ones, in the allocation's order.

    If too few are good, `bad` ones are taken, `failed` ones last of all; their problem then ends the run.
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
    """Return the map with an engine on another node, on the first free slots there.

    A node that is not in the topology is assumed to be like the engine's own. Raises PlacementError if there is no
    room.
    """
    group = next(group for group in ranks.tp_groups if (group.role, group.engine) == (role, engine))
    topology = ranks.topology
    if node not in {each.name for each in topology.nodes}:
        like = replace(topology.node(group.node), name=node)
        topology = replace(topology, nodes=(*topology.nodes, like))
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
    """Return a share without an engine."""
    kept = [place for place, (other, _) in enumerate(share.engines) if other != engine]
    gpus, ranks = tuple(share.gpus[place] for place in kept), tuple(share.ranks[place] for place in kept)
    return NodeShare(share.node, gpus, ranks, tuple(share.engines[place] for place in kept))

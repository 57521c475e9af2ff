"""Put the ranks of a run elsewhere when nodes are gone: on spare nodes of the allocation, or on those that are left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_rlhf.config.keys import get
from slurm_rlhf.config.roles import ROLLOUT, colocations
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError, shortened
from slurm_rlhf.placement.rank_map import RankMap, make_blocks, place, process_slots
from slurm_rlhf.placement.remedies import Change, changed
from slurm_rlhf.placement.role_sizes import RoleSize, role_sizes
from slurm_rlhf.placement.smaller import Smaller
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology

Fits = Callable[[Config], bool]
"""Tells whether the roles of a configuration fit the memory of its GPUs."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Says where the ranks go, and which keys of the configuration are others from then on."""

    ranks: RankMap
    change: Change = field(default_factory=dict)  # empty: all roles keep their sizes

    def words(self, config: Config) -> str:
        """Say what is smaller than in `config`; empty: nothing is."""
        return ", ".join(f"{key} = {value} (it was {get(config, key)})" for key, value in self.change.items())


def replaced(
    ranks: RankMap,
    bad: Collection[str],
    allocation: Topology,
    config: Config,
    fits: Fits = lambda config: True,
    unfit: Mapping[str, str] | None = None,
) -> Replacement:
    """Return a rank map without the nodes `bad`. `unfit`: nodes that take over nothing, and why.

    Where `allocation` has a free node for each of them, these take over their ranks, and all other ranks stay where
    they are. Otherwise the roles are placed on the nodes that are left, as large as they fit there: at their sizes, or
    at smaller ones that the rules of the configuration allow. Engines that live stay where they are if that can be.
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
        return _on_fewer(ranks, Topology(left, ranks.topology.accelerator, ranks.topology.origin), config, fits)
    except PlacementError as error:
        names = shortened([node.name for node in left])
        raise PlacementError(
            f"{spares} ({len(free)} are free), and the roles do not fit what is left ({names}): "
            f"{error}. Keep a node in reserve: cluster.spares"
        ) from None


def passed_over(unfit: Mapping[str, str]) -> str:
    """Say which nodes are free and take over nothing, and why."""
    return "; ".join(f"{node} is free and not taken: {why}" for node, why in sorted(unfit.items()))


def _on_fewer(ranks: RankMap, left: Topology, config: Config, fits: Fits) -> Replacement:
    """Find the largest layout that fits the nodes `left`. Raises PlacementError."""
    refused: PlacementError | None = None
    large = False  # a layout would fit, but for the memory of the GPUs
    smaller = Smaller.of(config, len(left.nodes))
    for change in smaller.changes():
        candidate = changed(config, change)
        found = next(_placed(ranks, left, candidate), None)
        if found is not None and not (change and left.accelerator == GPU and not fits(candidate)):
            return Replacement(found, change)
        large = large or found is not None
    try:
        place(left, role_sizes(config), colocations(config))
    except PlacementError as error:
        refused = error
    if large:
        raise PlacementError(f"{refused}; those layouts that would fit need more memory than a GPU has")
    least = f"the smallest that the rules of the configuration allow needs {smaller.least} slots"
    raise PlacementError(f"{refused}; nor does any smaller layout" + (f": {least}" if smaller.least else ""))


def _placed(ranks: RankMap, left: Topology, config: Config) -> Iterator[RankMap]:
    """Yield the maps of a layout that fit: the one in which engines stay where they are comes first."""
    sizes, colocate = role_sizes(config), colocations(config)
    if left.accelerator == GPU and sum(block.slots for block in make_blocks(sizes, colocate)) > left.slots:
        return  # at once: `place` would find out why
    for way in (_around_engines, _anew):
        try:
            if (found := way(ranks, left, sizes, colocate)) is not None:
                yield found
        except PlacementError:
            continue


def _anew(ranks: RankMap, left: Topology, sizes: Sequence[RoleSize], colocate: Sequence[frozenset[str]]) -> RankMap:
    return place(_with_slots(left, sizes, colocate), sizes, colocate)


def _around_engines(
    ranks: RankMap, left: Topology, sizes: Sequence[RoleSize], colocate: Sequence[frozenset[str]]
) -> RankMap | None:
    """Place all other roles beside the engines; None where these are no others, or cannot stay as they are."""
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
    beside = replace(left, nodes=tuple(replace(node, gpus=len(free[node.name])) for node in left.nodes))
    placed = place(beside, others, colocate)
    roles = {
        role: [replace(share, gpus=tuple(free[share.node][slot] for slot in share.gpus)) for share in found]
        for role, found in placed.roles.items()
    }
    return RankMap(left, {**roles, ROLLOUT: shares})


def _with_slots(left: Topology, sizes: Sequence[RoleSize], colocate: Sequence[frozenset[str]]) -> Topology:
    """Without GPUs slots are processes, as many as the roles need."""
    return process_slots(left, sizes, colocate) if left.accelerator == CPU else left


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

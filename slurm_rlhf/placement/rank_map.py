"""Make and draw the rank map: which rank of which role runs on which slot of which node.

Pure: every node computes the same map from topology, sizes of roles and colocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from slurm_rlhf.config.roles import ROLES, role_order
from slurm_rlhf.errors import PlacementError, shortened
from slurm_rlhf.placement.packing import Assignment, Block, assign_slots, pack
from slurm_rlhf.placement.topology import CPU, GPU, Node, RoleSize, Topology, explain


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Describe the part of one role on one node.

    `gpus[i]` is the slot of rank `ranks[i]`; for a role made of engines `engines[i]` is (engine index, TP rank),
    for the others `engines` is empty.
    """

    node: str
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    engines: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TpGroup:
    """Describe one engine: slot `gpus[i]` of the node is for TP rank i, which is rank `ranks[i]` of the role."""

    role: str
    engine: int
    node: str
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankMap:
    """Hold the shares of each role, in node order. Ranks count up over nodes, then slots."""

    topology: Topology
    roles: dict[str, list[NodeShare]]

    def world(self, role: str) -> int:
        """Count the ranks of `role`; KeyError if it does not run."""
        return sum(len(share.ranks) for share in self.roles[role])

    @property
    def used_nodes(self) -> list[str]:
        """List the nodes that hold a rank, in the order of the topology."""
        used = {share.node for shares in self.roles.values() for share in shares}
        return [node.name for node in self.topology.nodes if node.name in used]

    @property
    def worlds(self) -> dict[str, int]:
        """Count the ranks of each role."""
        return {role: self.world(role) for role in self.roles}

    @property
    def tp_groups(self) -> list[TpGroup]:
        """List all engines, by role and index."""
        groups = []
        for role, shares in self.roles.items():
            for share in shares:
                engines = [engine for engine, _ in share.engines]
                for engine in dict.fromkeys(engines):
                    first = engines.index(engine)
                    own = slice(first, first + engines.count(engine))
                    groups.append(TpGroup(role, engine, share.node, share.gpus[own], share.ranks[own]))
        return groups

    @property
    def engine_nodes(self) -> dict[int, str]:
        """Return the node of each engine."""
        return {group.engine: group.node for group in self.tp_groups}

    def to_json(self) -> dict[str, Any]:
        """Return the map ready for JSON; `roles` has a list of {node, gpus, ranks, engines} for each role."""
        from msgspec import to_builtins

        more = {"roles": self.roles, "tp_groups": self.tp_groups, "world": self.worlds}
        return {**to_builtins(self.topology), **to_builtins(more)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankMap:
        """Read what `to_json` wrote."""
        from msgspec import convert

        return cls(convert(data, Topology), convert(data["roles"], dict[str, list[NodeShare]]))


def place(topology: Topology, roles: Sequence[RoleSize], colocate: Sequence[frozenset[str]] = ()) -> RankMap:
    """Put `roles` on the slots of `topology`.

    Roles get nodes of their own where there are enough, else they share nodes, each role in the same way on all its
    nodes where that is possible. An engine's slots are neighbours on one node, starting at a multiple of its width.
    The roles of a set in `colocate` use the same slots; roles in it that do not run are ignored. The order of
    `roles` does not matter. Raises PlacementError with the reason and the nodes that would do.
    """
    ordered = sorted(roles, key=lambda size: role_order(size.role))
    blocks = make_blocks(ordered, colocate)
    assignments = pack([node.gpus for node in topology.nodes], blocks)
    if assignments is None:
        raise PlacementError(explain(topology, ordered, blocks))
    return RankMap(topology, _shares(topology, ordered, blocks, assignments))


def make_blocks(sizes: Sequence[RoleSize], colocate: Sequence[frozenset[str]]) -> list[Block]:
    """Make a block for each role or set of colocated roles. Raises PlacementError where these differ in size."""
    blocks = []
    groups: dict[frozenset[str], list[RoleSize]] = {}  # sizes by the first set that has the role
    for size in sorted(sizes, key=lambda size: role_order(size.role)):
        together = next((names for names in colocate if size.role in names), frozenset({size.role}))
        groups.setdefault(together, []).append(size)
    for group in groups.values():
        first, *others = sorted(group, key=lambda size: size.engines > 0)  # trainers before engines
        for other in others:
            if not _same_slots(first, other):
                raise PlacementError(_unlike(first, other))
        names, last = tuple(size.role for size in group), others[-1] if others else first
        tp = last.tp if last.engines else 0
        blocks.append(Block(names, first.num_nodes, first.num_gpus_per_node, tp, last.engines))
    return blocks


def process_slots(topology: Topology, roles: Sequence[RoleSize], colocate: Sequence[frozenset[str]] = ()) -> Topology:
    """Give each node of a topology without GPUs as many slots as the roles need there; colocated roles share them.

    Raises PlacementError where colocated roles differ in size.
    """
    count = len(topology.nodes)
    slots = 0
    for block in make_blocks(roles, colocate):
        slots += block.per_node or block.tp * -(-block.engines // (block.num_nodes or count))
    nodes = tuple(Node(node.name, slots, node.cpus) for node in topology.nodes)
    return Topology(nodes, CPU, workers=topology.workers)


def _same_slots(first: RoleSize, other: RoleSize) -> bool:
    if first.engines or not other.engines:
        return astuple(first)[1:] == astuple(other)[1:]  # all but the name
    same_nodes = other.num_nodes in (0, first.num_nodes)
    return same_nodes and first.slots == other.slots and first.num_gpus_per_node % other.tp == 0


def _unlike(first: RoleSize, other: RoleSize) -> str:
    def say(size: RoleSize) -> str:
        return ", ".join(f"{key} = {value}" for key, value in size.settings().items())

    return (
        f"{first.role} and {other.role} are colocated, so they must have the same slots on the same nodes: "
        f"{say(first)}; but {say(other)}. Make them equal, or do not colocate them."
    )


def _shares(
    topology: Topology, sizes: Sequence[RoleSize], blocks: Sequence[Block], assignments: Sequence[Assignment]
) -> dict[str, list[NodeShare]]:
    on_node: list[list[int]] = [[] for _ in topology.nodes]  # blocks
    wanted: list[list[tuple[int, int]]] = [[] for _ in topology.nodes]
    for number, assignment in enumerate(assignments):
        width = blocks[number].tp
        for index, slots in assignment:
            on_node[index].append(number)
            wanted[index].append((slots // width, width) if width else (slots, 0))
    roles: dict[str, list[NodeShare]] = {size.role: [] for size in sizes}
    made_of_engines = {size.role for size in sizes if size.engines}
    next_rank = [0] * len(blocks)
    for node, here, wants in zip(topology.nodes, on_node, wanted, strict=True):
        assigned = assign_slots(node.gpus, tuple(wants))
        if assigned is None:
            widths = " and ".join(str(width) for _, width in wants if width)
            raise PlacementError(f"node {node.name}: engines {widths} wide cannot all be aligned on {node.gpus} slots")
        for number, gpus in zip(here, assigned, strict=True):
            block, start = blocks[number], next_rank[number]
            next_rank[number] += len(gpus)
            ranks = tuple(range(start, start + len(gpus)))
            engines = tuple(divmod(rank, block.tp) for rank in ranks) if block.tp else ()
            for role in block.roles:
                roles[role].append(NodeShare(node.name, gpus, ranks, engines if role in made_of_engines else ()))
    return roles


def draw(rank_map: RankMap, max_rows: int = 64) -> str:
    """Draw one row per node, one column per slot, then a legend.

    A0 is rank 0 of the actor, E3.1 TP rank 1 of engine 3, A0+R0 two colocated ranks, a dot a free slot. With
    more than `max_rows` nodes the middle rows are left out.
    """
    nodes = rank_map.topology.nodes
    cells: dict[str, dict[int, str]] = {node.name: {} for node in nodes}
    for role, shares in rank_map.roles.items():
        letter = ROLES[role].letter if role in ROLES else f"{role}:"
        for share in shares:
            row = cells[share.node]
            names = [f"{engine}.{tp_rank}" for engine, tp_rank in share.engines] or share.ranks
            for gpu, name in zip(share.gpus, names, strict=True):
                row[gpu] = f"{row[gpu]}+{letter}{name}" if gpu in row else f"{letter}{name}"
    unit = "gpu" if rank_map.topology.accelerator == GPU else "slot"
    width = max((node.gpus for node in nodes), default=0)
    table = [["node", *(f"{unit}{index}" for index in range(width))]]
    half = max_rows // 2
    for index, node in enumerate(nodes):
        if len(nodes) <= max_rows or index < half or index >= len(nodes) - half:
            table.append([node.name, *(cells[node.name].get(gpu, ".") for gpu in range(node.gpus))])
        elif index == half:
            table.append([f"... {len(nodes) - 2 * half} more nodes"])
    return "\n".join([*_aligned(table), "", *_legend(rank_map)])


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(len(table[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip() for row in table]


def _legend(rank_map: RankMap) -> list[str]:
    lines = []
    engines = {role: [group for group in rank_map.tp_groups if group.role == role] for role in rank_map.roles}
    for role, shares in rank_map.roles.items():
        letter, ranks = ROLES[role].letter if role in ROLES else role, rank_map.world(role)
        text = f"{letter} {role}: {_counted(ranks, 'rank')} on {_counted(len(shares), 'node')}"
        if engines[role]:
            text += f", {_counted(len(engines[role]), 'engine')} of TP {len(engines[role][0].gpus)}"
        lines.append(text)
    used = len({(share.node, gpu) for shares in rank_map.roles.values() for share in shares for gpu in share.gpus})
    unit = "GPUs" if rank_map.topology.accelerator == GPU else "process slots"
    lines.append(f"{used} of {rank_map.topology.slots} {unit} used")
    if workers := rank_map.topology.workers:
        lines.append(f"workers, and no ranks, on {_counted(len(workers), 'more node')}: {shortened(workers, 4)}")
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"

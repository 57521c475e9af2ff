"""The nodes a run has and the accelerator slots on each of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from slurm_rlhf.errors import PlacementError

GPU = "gpu"
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine.

    `gpus` counts accelerator slots: GPUs, or processes where the topology's accelerator is "cpu". `devices` are
    the names of the GPUs as the visibility variable wants them ("2", "GPU-5f..."); empty: "0" to "gpus - 1".
    """

    name: str
    gpus: int
    cpus: int = 0  # 0: not known
    devices: tuple[str, ...] = ()

    def visible(self, slots: Sequence[int]) -> str:
        """The visibility variable's value for `slots`, comma-separated."""
        return ",".join(self.devices[slot] if self.devices else str(slot) for slot in slots)


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes in the order in which ranks are numbered. PlacementError if there is none or a name occurs twice."""

    nodes: tuple[Node, ...]
    accelerator: str = GPU  # "gpu" or "cpu"
    origin: str = field(default="", compare=False)  # who told the number of GPUs, for messages; empty: nobody to name

    def __post_init__(self) -> None:
        if not self.nodes:
            raise PlacementError("a topology needs at least one node")
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise PlacementError(f"node {node.name} is listed twice: name every node of the topology once")
            seen.add(node.name)

    @classmethod
    def uniform(cls, names: Sequence[str], gpus_per_node: int) -> Topology:
        """Nodes `names` with the same number of GPUs."""
        return cls(tuple(Node(name, gpus_per_node) for name in names))

    @property
    def slots(self) -> int:
        """Accelerator slots on all nodes together."""
        return sum(node.gpus for node in self.nodes)

    def node(self, name: str) -> Node:
        """The node called `name`; KeyError if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def without(self, names: Collection[str]) -> Topology:
        """The topology with `names` left out; PlacementError if one of them is not in it or if none is left."""
        unknown = sorted(set(names) - {node.name for node in self.nodes})
        if unknown:
            some = ", ".join(node.name for node in self.nodes[:8])
            more = ", ..." if len(self.nodes) > 8 else ""
            raise PlacementError(f"cannot exclude {', '.join(unknown)}: not among the nodes ({some}{more})")
        excluded = set(names)
        left = tuple(node for node in self.nodes if node.name not in excluded)
        if not left:
            raise PlacementError(f"all {len(self.nodes)} nodes are excluded: leave at least one")
        return Topology(left, self.accelerator, self.origin)


def numbered_names(count: int) -> list[str]:
    """Names of `count` nodes that nobody has named: node1 ... or node01 ..., padded to one width."""
    width = len(str(count))
    return [f"node{index:0{width}d}" for index in range(1, count + 1)]

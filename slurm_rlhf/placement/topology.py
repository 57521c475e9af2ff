"""Describe the nodes of a run and the accelerator slots on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slurm_rlhf.errors import PlacementError

GPU = "gpu"
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Node:
    """Describe one machine.

    `gpus` counts accelerator slots: GPUs, or processes where the topology's accelerator is "cpu". `devices` are
    the names of the GPUs as the visibility variable writes them ("2", "GPU-5f..."); empty: "0" to "gpus - 1".
    """

    name: str
    gpus: int
    cpus: int = 0  # 0: not known
    devices: tuple[str, ...] = ()

    def visible(self, slots: Sequence[int]) -> str:
        """Return the value of the visibility variable for `slots`, comma-separated."""
        return ",".join(self.devices[slot] if self.devices else str(slot) for slot in slots)


@dataclass(frozen=True, slots=True)
class Topology:
    """Hold nodes in the order in which ranks are numbered. Raises PlacementError for no node or a repeated name."""

    nodes: tuple[Node, ...]
    accelerator: str = GPU  # "gpu" or "cpu"
    origin: str = field(default="", compare=False)  # source of the number of GPUs, for messages; empty: none to name

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
        """Make nodes `names` with the same number of GPUs each."""
        return cls(tuple(Node(name, gpus_per_node) for name in names))

    @property
    def slots(self) -> int:
        """Count the accelerator slots on all nodes together."""
        return sum(node.gpus for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node called `name`; KeyError if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)


def numbered_names(count: int) -> list[str]:
    """Invent names for `count` nodes: node1 ... or node01 ..., padded to one width."""
    width = len(str(count))
    return [f"node{index:0{width}d}" for index in range(1, count + 1)]

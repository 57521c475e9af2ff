"""Describe the nodes of a run with their accelerator slots, the sizes of its roles, and why roles do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_rlhf.config.roles import ROLES, running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError, shortened
from slurm_rlhf.placement.packing import Block, pack

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
    workers: tuple[str, ...] = ()  # names of further nodes, on which workers run and no ranks

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len({*names}) < len(names):
            raise PlacementError(f"a topology needs at least one node, and each once: {', '.join(names) or 'none'}")

    @classmethod
    def uniform(cls, names: Sequence[str], gpus_per_node: int) -> Topology:
        """Make nodes `names` with the same number of GPUs each."""
        return cls(tuple(Node(name, gpus_per_node) for name in names))

    @property
    def slots(self) -> int:
        """Count the accelerator slots on all nodes together."""
        return sum(node.gpus for node in self.nodes)

    def keep_for_workers(self, count: int) -> Topology:
        """Keep the last `count` nodes for workers. Raises PlacementError where none would be left for ranks."""
        left = len(self.nodes) - count
        if left < 1:
            names = shortened([node.name for node in self.nodes], 4)
            raise PlacementError(
                f"reward.workers_num_nodes = {count}, and no node is left for ranks: there is only {names}. Start the "
                f"run in a Slurm allocation with {count} more (sbatch --nodes), or set the key to 0: workers then run "
                "next to the conductor"
            )
        return replace(self, nodes=self.nodes[:left], workers=tuple(node.name for node in self.nodes[left:]))

    def node(self, name: str) -> Node:
        """Return the node called `name`; KeyError if there is none."""
        return {node.name: node for node in self.nodes}[name]


def numbered_names(count: int) -> list[str]:
    """Invent names for `count` nodes: node1 ... or node01 ..., padded to one width."""
    width = len(str(count))
    return [f"node{index:0{width}d}" for index in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class RoleSize:
    """Describe the slots that one role asks for.

    A role of `engines` engines takes `tp` neighbouring slots of one node for each; its `num_nodes` may be 0 (as few
    nodes as hold them) and its `num_gpus_per_node` follows from the placement. Any other role takes
    `num_gpus_per_node` slots on each of `num_nodes` nodes.
    """

    role: str
    num_nodes: int
    num_gpus_per_node: int = 0
    tp: int = 1
    engines: int = 0

    @property
    def slots(self) -> int:
        """Count the slots on all nodes together: the world size of the role."""
        return self.engines * self.tp if self.engines else self.num_nodes * self.num_gpus_per_node

    def key(self, name: str) -> str:
        """Return the configuration key for `name` of this role, e.g. `vllm.num_engines`."""
        return f"{ROLES[self.role].group if self.role in ROLES else self.role}.{name}"

    def settings(self) -> dict[str, int]:
        """Return the configuration keys and values that give this size."""
        if not self.engines:
            return {self.key("num_nodes"): self.num_nodes, self.key("num_gpus_per_node"): self.num_gpus_per_node}
        engines = {self.key("num_engines"): self.engines, self.key("tensor_parallel_size"): self.tp}
        return {**engines, self.key("num_nodes"): self.num_nodes} if self.num_nodes else engines


def role_sizes(config: Config) -> list[RoleSize]:
    """Return the sizes of the roles that a run with `config` starts, in the order of the table of roles."""
    sizes = []
    for role in running_roles(config):
        group = role.settings(config)
        if role.kind == "engine":
            sizes.append(RoleSize(role.name, group.num_nodes, tp=group.tensor_parallel_size, engines=group.num_engines))
        else:
            sizes.append(RoleSize(role.name, group.num_nodes, group.num_gpus_per_node))
    return sizes


def explain(topology: Topology, sizes: Sequence[RoleSize], blocks: Sequence[Block]) -> str:
    """Write the error message for role sizes that do not fit `topology`; `blocks` are made of them."""
    unit = "GPUs" if topology.accelerator == GPU else "slots"
    largest = max(node.gpus for node in topology.nodes)
    asked = ", ".join(f"{key} = {value}" for size in sizes for key, value in size.settings().items())
    nodes = nodes_needed(largest, blocks)
    remedy = "lower these keys"
    if nodes is None:
        remedy = f"no number of nodes with {largest} {unit} holds them: lower these keys"
    elif nodes > len(topology.nodes):
        remedy += f", or run on {nodes} nodes of {largest} {unit} (sbatch --nodes={nodes})"
    reason = _reason(topology, sizes, sum(block.slots for block in blocks), unit)
    return f"the roles do not fit: {reason}\n  asked for: {asked}\n  {remedy}"


def nodes_needed(slots: int, blocks: Sequence[Block]) -> int | None:
    """Find the fewest nodes with `slots` slots each that hold `blocks`; None if no number does."""

    def fit(nodes: int) -> bool:
        return pack([slots] * nodes, blocks, thorough=False) is not None

    low, high = 0, sum(block.num_nodes or block.engines for block in blocks)
    if not fit(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) else (middle, high)
    return high


def _reason(topology: Topology, sizes: Sequence[RoleSize], needed: int, unit: str) -> str:
    """Find the first reason that holds, most specific first."""
    largest = max(topology.nodes, key=lambda node: node.gpus)
    count = len(topology.nodes)
    for size in sizes:
        if size.engines and size.tp > largest.gpus:
            key = size.key("tensor_parallel_size")
            room = f"the largest, {largest.name}, has {largest.gpus} {unit}"
            return f"{key} = {size.tp}, but an engine lives on one node and {room}"
        if size.num_gpus_per_node > largest.gpus:
            key = size.key("num_gpus_per_node")
            return f"{key} = {size.num_gpus_per_node}, but the largest node, {largest.name}, has {largest.gpus} {unit}"
        if size.num_nodes > count:
            there = "is 1 node" if count == 1 else f"are {count} nodes"
            return f"{size.key('num_nodes')} = {size.num_nodes}, but there {there}"
        if size.engines and size.num_nodes > size.engines:
            return f"{size.key('num_nodes')} = {size.num_nodes}, but there are only {size.engines} engines to spread"
    gpus = sorted({node.gpus for node in topology.nodes})
    each = f"{gpus[0]} each" if len(gpus) == 1 else f"{gpus[0]} to {gpus[-1]} each"
    have = f"{count} {'node' if count == 1 else 'nodes'} with {topology.slots} {unit} ({each})"
    if needed > topology.slots:
        return f"they need {needed} {unit}; given: {have}"
    return f"they need {needed} {unit} in shapes that cannot lie side by side on {have}"

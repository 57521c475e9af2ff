"""Explain why roles do not fit: what is asked for, what is there, why, and the nodes needed."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.placement.packing import Block, pack
from slurm_rlhf.placement.role_sizes import RoleSize
from slurm_rlhf.placement.topology import GPU, Topology


def explain(topology: Topology, sizes: Sequence[RoleSize], blocks: Sequence[Block]) -> str:
    """Write the message for `sizes`, in `blocks`, which do not fit `topology`."""
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
    if topology.origin and topology.accelerator == GPU:
        have += f", as {topology.origin} says"
    if needed > topology.slots:
        return f"they need {needed} {unit}; given: {have}"
    return f"they need {needed} {unit} in shapes that cannot lie side by side on {have}"

"""What to say when roles do not fit: why, the largest layout that would, and the keys to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurm_rlhf.placement.packing import Block, pack
from slurm_rlhf.placement.role_sizes import RoleSize
from slurm_rlhf.placement.topology import GPU, Topology

Sizes = list[RoleSize]
MakeBlocks = Callable[[Sequence[RoleSize]], list[Block]]

_FIELDS = ("num_gpus_per_node", "num_nodes", "engines", "tp")


def explain(topology: Topology, sizes: Sequence[RoleSize], make_blocks: MakeBlocks) -> str:
    """The message of the PlacementError for `sizes`, which do not fit `topology`."""
    search = _Search([node.gpus for node in topology.nodes], make_blocks)
    unit = "GPUs" if topology.accelerator == GPU else "slots"
    asked = list(sizes)
    lines = [f"the roles do not fit: {_why(topology, asked, search.slots(asked), unit)}"]
    lines.append(f"  asked for: {_settings(asked)}")
    single = search.single_changes(asked)
    best = max(single, key=search.slots, default=None) or search.joint_change(asked)
    if best is None:
        lines.append(
            f"  not even the smallest layout, one slot for each role, fits these nodes ({topology.slots} {unit})"
        )
    else:
        used = f"{search.slots(best)} of {topology.slots} {unit}"
        lines.append(f"  the largest layout that fits: {_changes(asked, best)}; all else as it is ({used})")
        others = [_changes(asked, sizes) for sizes in single if sizes is not best]
        if others:
            lines.append(f"  or change only {'; or only '.join(others)}")
    nodes = search.nodes_needed(asked)
    if nodes is not None:
        lines.append(f"  or run on {nodes} nodes of {search.largest} {unit} (sbatch --nodes={nodes})")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Search:
    capacities: list[int]
    make_blocks: MakeBlocks

    @property
    def largest(self) -> int:
        return max(self.capacities, default=0)

    def slots(self, sizes: Sequence[RoleSize]) -> int:
        return sum(block.slots for block in self.make_blocks(sizes))

    def fits(self, sizes: Sequence[RoleSize]) -> bool:
        return pack(self.capacities, self.make_blocks(sizes), thorough=False) is not None

    def single_changes(self, sizes: Sizes) -> list[Sizes]:
        """For each key, the layout with its largest value that fits while all others stay."""
        found = []
        for roles, name in self._knobs(sizes):
            changed = self._largest(sizes, roles, name, _value(sizes, roles, name) - 1)
            if changed is not None:
                found.append(changed)
        return found

    def joint_change(self, sizes: Sizes) -> Sizes | None:
        """Halve what takes most until it fits, then let every key grow again as far as it can."""
        start, current = sizes, sizes
        while not self.fits(current):
            smaller = self._halved(current)
            if smaller is None:
                return None
            current = smaller
        for roles, name in self._knobs(start):
            current = self._largest(current, roles, name, _value(start, roles, name)) or current
        return current

    def nodes_needed(self, sizes: Sizes) -> int | None:
        """The fewest nodes like the largest one that hold `sizes`; None if no number does."""
        blocks = self.make_blocks(sizes)
        high = sum(block.num_nodes or block.engines for block in blocks)
        if pack([self.largest] * high, blocks, thorough=False) is None:
            return None
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pack([self.largest] * middle, blocks, thorough=False) else (middle, high)
        return high if high > len(self.capacities) else None

    def _knobs(self, sizes: Sizes) -> Iterator[tuple[tuple[str, ...], str]]:
        """(colocated roles, field) for every number that can be made smaller."""
        for block in self.make_blocks(sizes):
            mixed = block.tp and block.per_node
            for name in _FIELDS:
                if _value(sizes, block.roles, name) > 1 and not (mixed and name != "num_nodes"):
                    yield block.roles, name

    def _largest(self, sizes: Sizes, roles: tuple[str, ...], name: str, high: int) -> Sizes | None:
        """`sizes` with the largest value of `name` up to `high` that fits."""
        low, best = 1, None
        while low <= high:
            middle = (low + high + 1) // 2
            changed = _with(sizes, roles, name, middle)
            if self.fits(changed):
                low, best = middle + 1, changed
            else:
                high = middle - 1
        return best

    def _halved(self, sizes: Sizes) -> Sizes | None:
        limits = {"num_gpus_per_node": self.largest, "num_nodes": len(self.capacities), "tp": self.largest}
        knobs = list(self._knobs(sizes))
        for roles, name in knobs:
            if _value(sizes, roles, name) > limits.get(name, _value(sizes, roles, name)):
                return _with(sizes, roles, name, max(1, limits[name]))
        if not knobs:
            return None
        slots = {block.roles: block.slots for block in self.make_blocks(sizes)}
        roles, name = max(knobs, key=lambda knob: slots[knob[0]])
        return _with(sizes, roles, name, _value(sizes, roles, name) // 2)


def _value(sizes: Sizes, roles: tuple[str, ...], name: str) -> int:
    return max(getattr(size, name) for size in sizes if size.role in roles)


def _with(sizes: Sizes, roles: tuple[str, ...], name: str, value: int) -> Sizes:
    """`sizes` with the field `name` of `roles` set; engines colocated with trainers follow their slots."""
    trainers = [size for size in sizes if size.role in roles and not size.engines]
    changed = []
    for size in sizes:
        if size.role not in roles:
            changed.append(size)
        elif size.engines and trainers:
            slots = _resized(trainers[0], name, value).slots
            nodes = value if size.num_nodes else 0
            changed.append(replace(size, engines=slots // size.tp, num_nodes=nodes))
        elif size.engines and name == "engines":
            changed.append(replace(size, engines=value, num_nodes=min(size.num_nodes, value)))
        else:
            changed.append(_resized(size, name, value))
    return changed


def _resized(size: RoleSize, name: str, value: int) -> RoleSize:
    fields: dict[str, Any] = {name: value}
    return replace(size, **fields)


def _settings(sizes: Sizes) -> str:
    return ", ".join(f"{key} = {value}" for size in sizes for key, value in size.settings().items())


def _changes(asked: Sizes, wanted: Sizes) -> str:
    pairs = [
        f"{key} = {value}"
        for before, after in zip(asked, wanted, strict=True)
        for key, value in after.settings().items()
        if before.settings().get(key) != value
    ]
    return ", ".join(pairs)


def _why(topology: Topology, sizes: Sizes, needed: int, unit: str) -> str:
    """The first reason that holds, most specific first."""
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
            return f"{size.key('num_nodes')} = {size.num_nodes}, but there are {count} nodes"
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

"""Which of a node's network interfaces a rank takes: one near its device, and with its neighbours all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_UNKNOWN = -1  # as the kernel writes it


def pick(interfaces: Sequence[str], numa: Mapping[str, int], mine: int, rank: int) -> str:
    """Of `interfaces`, those on the rank's NUMA node `mine`, in turn; of all, where none is or it is not known."""
    near = [name for name in interfaces if mine != _UNKNOWN and numa.get(name, _UNKNOWN) == mine] or list(interfaces)
    return near[rank % len(near)]


def rail_of(interfaces: Sequence[str], device: str, rank: int) -> str:
    """`pick` on this machine. `device`: PCI address of the rank's GPU, empty without one."""
    numa = {name: _numa(Path("/sys/class/net") / name / "device") for name in interfaces}
    mine = _numa(Path("/sys/bus/pci/devices") / device) if device else _UNKNOWN
    return pick(interfaces, numa, mine, rank)


def _numa(device: Path) -> int:
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return _UNKNOWN  # a virtual interface, a bond

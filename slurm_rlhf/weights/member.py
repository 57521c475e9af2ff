"""How a rank joins a group, and what it says of itself there: its node, its GPU, its network interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_UNKNOWN = -1  # a NUMA node, as the kernel writes it


@dataclass(frozen=True, slots=True)
class Membership:
    """Say how a rank joins a group; the same on all members but for `rank`, `label` and `node`."""

    name: str
    rank: int  # the actor's ranks count first
    world: int
    actors: int  # how many of `world` are the actor's
    host: str  # name of the node with the store
    port: int
    timeout_s: float
    backend: str = "auto"
    interface: str = ""  # or several with commas: each rank takes one; empty: the one that reaches the store
    label: str = ""  # how messages name the rank
    node: str = ""  # ranks of one node share it; empty: the host name
    directory: str = ""  # for the disk backend; all members see it
    colocated: bool = False  # actor and engines share their slots
    whole: bool = False  # each of the actor's ranks holds the whole model
    silence_s: float = 15.0  # a member that is not heard for so long during an update has broken it


@dataclass(frozen=True, slots=True)
class Member:
    """Tell the others about a rank."""

    rank: int
    label: str
    node: str
    host: str  # its name for itself
    pid: int
    address: str  # the others connect to it
    interface: str
    backend: str  # wanted
    device: str  # its GPU; empty without one
    port: int = 0  # at which the others may try whether they can reach it
    heartbeat_port: int = 0  # for the heartbeats of its peers

    def __str__(self) -> str:
        return f"{self.label} on {self.node} (pid {self.pid})"

    @property
    def end(self) -> str:
        """Name the member as an end of a link."""
        return f"{self.label} on {self.node} ({self.interface}, {self.address})"


def nccl_available() -> bool:
    """Tell whether this process has a GPU and a torch with NCCL."""
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def device_name() -> str:
    """Return a name that no two GPUs share, of the current one; empty without one."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def device_names() -> list[str]:
    """Return `device_name` of every GPU that this process sees, by its number here."""
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def device_address() -> str:
    """Return the PCI address of the current GPU, as the kernel spells it; empty without one."""
    if not torch.cuda.is_available():
        return ""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def pick_interface(interfaces: Sequence[str], numa: Mapping[str, int], mine: int, rank: int) -> str:
    """Choose among those on the rank's NUMA node `mine`, in turn; among all where none is there or it is not known."""
    near = [name for name in interfaces if mine != _UNKNOWN and numa.get(name, _UNKNOWN) == mine] or list(interfaces)
    return near[rank % len(near)]


def interface_near(interfaces: Sequence[str], device: str, rank: int) -> str:
    """Choose an interface of this machine for a rank. `device`: PCI address of its GPU, empty without one."""
    numa = {name: _numa(Path("/sys/class/net") / name / "device") for name in interfaces}
    mine = _numa(Path("/sys/bus/pci/devices") / device) if device else _UNKNOWN
    return pick_interface(interfaces, numa, mine, rank)


def _numa(device: Path) -> int:
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return _UNKNOWN  # a virtual interface, a bond

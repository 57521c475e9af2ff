"""Which GPU a rank has, and what no two of them share. Run through stand-ins, not on GPUs yet."""

from __future__ import annotations

import torch


def nccl_available() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def device_name() -> str:
    """What no two GPUs share; empty without one. Uses the current device."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def device_names() -> list[str]:
    """`device_name` of every GPU that this process sees, by its number here."""
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def device_address() -> str:
    """The current GPU's PCI address, as the kernel spells it; empty without one."""
    if not torch.cuda.is_available():
        return ""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

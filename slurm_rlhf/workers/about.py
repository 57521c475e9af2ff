"""What a rank says of its accelerator."""

from __future__ import annotations

from collections.abc import Callable

from slurm_rlhf.control.calls import DeviceReport


def about_device(attention: Callable[[], str]) -> DeviceReport | None:
    """Describe this process's accelerator; None: it has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return DeviceReport(
        gpu=torch.cuda.get_device_name(),
        total=int(total),
        used=int(total - free),
        allocated=int(torch.cuda.memory_allocated()),
        attention=attention(),
    )

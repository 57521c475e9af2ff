"""What a rank says of its accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def about_device(attention: Callable[[], str]) -> dict[str, Any]:
    """`gpu`, its name; `total`, `used` by all processes, and `allocated` by PyTorch in this one, in bytes; `attention`.

    Empty without an accelerator.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": torch.cuda.get_device_name(),
        "total": int(total),
        "used": int(total - free),
        "allocated": int(torch.cuda.memory_allocated()),
        "attention": attention(),
    }

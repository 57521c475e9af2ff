"""NCCL: between GPUs, one rank each."""

from __future__ import annotations

import torch


def nccl_available() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()

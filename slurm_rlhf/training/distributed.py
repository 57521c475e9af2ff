"""This process's place in its role's process group, and the time-out of every collective in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device


def join_world(timeout_s: float) -> World:
    """Join the process group that torchrun's environment describes; without one, form a group of one rank.

    NCCL where there are GPUs, gloo elsewhere. Called again, it returns the world that was joined before.
    """
    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        backend, timeout = ("nccl" if cuda else "gloo"), timedelta(seconds=timeout_s)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it in every case
        if cuda:
            torch.cuda.set_device(local_device())
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return World(dist.get_rank(), dist.get_world_size(), local_device())


def local_device() -> torch.device:
    """The accelerator that torchrun's local rank stands for, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def limit_collectives(timeout_s: float) -> None:
    """Give every process group of this process the time-out: DeepSpeed makes its sub-groups with torch's default."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def seed_rank(seed: int, rank: int, full_determinism: bool) -> None:
    """Seed torch for this rank. With `full_determinism`, kernels without a deterministic variant raise."""
    torch.manual_seed(seed + rank)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

"""This process in its role: process group, device and random state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from slurm_rlhf.errors import RunError
from slurm_rlhf.training._torch import limit_collectives


@dataclass(frozen=True, slots=True)
class World:
    """Says which rank of the process group of its role this process is."""

    rank: int
    size: int
    device: torch.device


def join_world(timeout_s: float, meet_s: float | None = None) -> World:
    """Join the process group that torchrun's environment describes; without one, form a group of one rank.

    NCCL where there are GPUs, gloo elsewhere. Collectives take `timeout_s` at most, forming the group `meet_s`, where
    that is less. Called again, it returns the world that was joined before. Raises RunError where the ranks do not
    meet.
    """
    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        backend, timeout = ("nccl" if cuda else "gloo"), timedelta(seconds=min(timeout_s, meet_s or timeout_s))
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it in every case
        if cuda:
            torch.cuda.set_device(local_device())
        if "RANK" in os.environ:
            try:
                dist.init_process_group(backend, timeout=timeout)
            except RuntimeError as error:
                raise RunError(_not_met(error, timeout.total_seconds())) from error
            limit_collectives(timeout_s)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return World(dist.get_rank(), dist.get_world_size(), local_device())


def _not_met(error: Exception, seconds: float) -> str:
    environ = os.environ
    where = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    return (
        f"rank {environ['RANK']} did not meet the other ranks of its role, {environ.get('WORLD_SIZE')} in all, at "
        f"{where} within {seconds:g} s (timeout.meet): {str(error).splitlines()[0]}. Either one of them cannot reach "
        "that address, as its log says then, or somebody has changed what torch keeps there while the role started: "
        "torch's store knows no password (.github/SECURITY.md). Start again, with GLOO_SOCKET_IFNAME on a network that "
        "others do not reach"
    )


def local_device() -> torch.device:
    """Return the accelerator of torchrun's local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def all_agree(value: bool, world: World) -> bool:
    """Tell whether `value` is true on every rank. Collective."""
    answer = torch.tensor(float(value), device=world.device)
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer.item())


def device_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def release_cache() -> None:
    """Give the memory that PyTorch keeps for later back to the GPU. Does nothing without one."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seed_rank(seed: int, rank: int, full_determinism: bool) -> None:
    """Seed torch for this rank. With `full_determinism`, kernels without a deterministic variant raise."""
    torch.manual_seed(seed + rank)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore, after the block, the random state and the train or eval mode of every submodule."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for part, mode in modes:
            part.training = mode

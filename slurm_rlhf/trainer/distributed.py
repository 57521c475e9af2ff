"""This process in its role: process group, device and random state."""

from __future__ import annotations

import atexit
import os
import timeit
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from slurm_rlhf.errors import RunError
from slurm_rlhf.polling import in_thread
from slurm_rlhf.process_groups._torch import meet
from slurm_rlhf.wire.codec import decode, encode

T = TypeVar("T")
FRAMES = 8
"""Most frames of a record that is sent from rank to rank."""


@dataclass(frozen=True, slots=True)
class World:
    """Says which rank of the process group of its role this process is."""

    rank: int
    size: int
    device: torch.device


def join_world(timeout_s: float, connect_s: float) -> World:
    """Join the process group that torchrun's environment describes; without one, form a group of one rank.

    NCCL where there are GPUs, gloo elsewhere. `timeout_s`: of its collectives; `connect_s`: of joining. Called again,
    it returns the world that was joined before. Raises RunError where the ranks do not meet.
    """
    if not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")  # libraries read it in every case
        if torch.cuda.is_available():
            torch.cuda.set_device(local_device())
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ:
            _meet(timeout, connect_s)
        else:
            dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(_leave)
    return World(dist.get_rank(), dist.get_world_size(), local_device())


def _leave() -> None:
    """End gloo's threads before the interpreter ends: one that frees a tensor after it would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _meet(timeout: timedelta, connect_s: float) -> None:
    """Form the group in a thread: torch's store client has no time-out if the process with the store hangs."""

    def join() -> None:
        if torch.cuda.is_available():  # each thread has its own current device
            torch.cuda.set_device(local_device())
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = meet(dist.PrefixStore(f"default_pg/{start}", store), rank, size)
        dist.init_process_group(_backend(), store=own, rank=rank, world_size=size, timeout=timeout)

    joining = in_thread(join, "join")
    wait([joining], connect_s)
    if joining.done():
        joining.result()
    else:
        raise RunError(
            f"the ranks of this role did not meet within {connect_s:g} s (timeout.connect): another rank has not come, "
            f"or their torchrun hangs, which has the store at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}; or a stranger has changed the store, which has no authentication: then "
            "put GLOO_SOCKET_IFNAME on a network that others do not reach"
        )


def local_device() -> torch.device:
    """Return the accelerator of torchrun's local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def barrier() -> None:
    """Wait for all ranks of the role.

    The GPU is named because torch warns otherwise. The group itself could know it (`device_id`), but then NCCL connects
    at once, and splits further groups off with all ranks.
    """
    device = local_device()
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def all_agree(value: bool, world: World) -> bool:
    """Tell whether `value` is true on every rank. Collective."""
    answer = torch.tensor(float(value), device=world.device)
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer.item())


def divided(jobs: Iterable[Callable[[], T]], kind: type[T]) -> list[T]:
    """Do each job on one rank; return the results of all, records of the type `kind`, on every rank. Collective.

    A process that has joined no group does all of them.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size == 1:
        return [job() for job in jobs]
    mine = [job() if place % size == rank else None for place, job in enumerate(jobs)]
    return [_of_rank(place % size, one, kind) for place, one in enumerate(mine)]


def _of_rank(source: int, value: T | None, kind: type[T]) -> T:
    """Return the value of the rank `source`; others have none. Collective."""
    frames = [] if value is None else [np.frombuffer(frame, np.uint8) for frame in encode(value)]
    sizes = torch.tensor([*map(len, frames), *[0] * (FRAMES - len(frames))], device=local_device())
    dist.broadcast(sizes, source)
    whole = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=sizes.device)
    if frames:
        whole.copy_(torch.from_numpy(np.concatenate(frames)))
    dist.broadcast(whole, source)
    parts = np.split(whole.cpu().numpy(), np.cumsum(sizes.cpu().numpy()))
    return decode([part.data for part in parts if len(part)], kind) if value is None else value


def device_bytes(device: torch.device) -> int:
    """Return the memory of a GPU in bytes; 0 for a CPU."""
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
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it
        torch.use_deterministic_algorithms(True)


_SCRATCH = 1 << 21  # numbers that `speed` computes with


def speed(world: World) -> tuple[float, float]:
    """Return the bytes per second of AdamW on this rank, and of an all-reduce over the ranks. Collective.

    The latter are 0 for one rank. Takes some hundredths of a second.
    """
    from slurm_rlhf.placement.step_time import ADAM_BYTES

    numbers = torch.zeros(_SCRATCH, requires_grad=True)
    numbers.grad = torch.ones(_SCRATCH)
    moved = ADAM_BYTES * _SCRATCH / fastest(torch.optim.AdamW([numbers], fused=True).step)
    if world.size == 1:
        return moved, 0.0
    # Gradients are laid end to end first, in new memory: more than malloc keeps when it is freed.
    parts = [*numbers.grad.split(_SCRATCH // 8)] * 5
    ring = 2 * (world.size - 1) / world.size * 5 * numbers.grad.nbytes
    return moved, ring / fastest(lambda: dist.all_reduce(torch.cat(parts)))


def fastest(work: Callable[[], object]) -> float:
    """Do the work three times, and return the seconds of the fastest: the first has more to do."""
    return min(timeit.repeat(work, repeat=3, number=1))


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

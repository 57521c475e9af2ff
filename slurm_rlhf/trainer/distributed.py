"""This process in its role: process group, device and random state.

Ranks may compute a packed row together: each then has a part of its tokens, and for attention a part of the heads.

Attention needs all tokens of a sequence, and nothing of other heads. So before it the ranks of a group exchange parts
of tokens for parts of heads, and behind it they exchange them back; all else in a model works on each token alone.
Source: Jacobs et al., Ulysses (2023), arXiv 2309.14509.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.polling import in_thread
from slurm_rlhf.process_groups._torch import meet


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
    """Join gloo's threads before the interpreter ends: one that still lets go of a tensor would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _meet(timeout: timedelta, connect_s: float) -> None:
    """Form the group in a thread: towards a store whose process stands still, torch's clients have no time-out."""

    def join() -> None:
        if torch.cuda.is_available():  # each thread has its own
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
            f"or their torchrun stands still, which has the store at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}; or a stranger has changed the store, which knows no password: then put "
            "GLOO_SOCKET_IFNAME on a network that others do not reach"
        )


def local_device() -> torch.device:
    """Return the accelerator of torchrun's local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def barrier() -> None:
    """Wait for all ranks of the role, on NCCL by a sum on this rank's GPU.

    Unless the GPU is named, torch takes the current one, which is the same, and warns. With `device_id` the group
    would know it, too, but then NCCL connects at once, and splits further groups off with all ranks.
    """
    device = local_device()
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


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
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it
        torch.use_deterministic_algorithms(True)


_SCRATCH = 1 << 21  # numbers


def speed(world: World) -> tuple[float, float]:
    """Return the bytes a second that AdamW moves here, and those that a ring over the ranks does; collective.

    The latter is 0 for one rank. Takes some hundredths of a second.
    """
    from slurm_rlhf.placement.step_time import ADAM_BYTES

    numbers = torch.zeros(_SCRATCH, requires_grad=True)
    numbers.grad = torch.ones(_SCRATCH)
    moved = ADAM_BYTES * _SCRATCH / fastest(torch.optim.AdamW([numbers], fused=True).step)
    if world.size == 1:
        return moved, 0.0
    ring = 2 * (world.size - 1) / world.size * numbers.grad.nbytes
    return moved, ring / fastest(partial(dist.all_reduce, numbers.grad))


def fastest(work: Callable[[], object]) -> float:
    """Do the work three times, and return the seconds of the fastest: the first has more to do."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Knows the ranks that share rows. Its exchanges are collective, their backward passes too."""

    rank: int  # in the group
    size: int
    handle: dist.ProcessGroup

    def tokens(self, width: int) -> slice:
        """Return which tokens of a row of `width`, a multiple of `size`, this rank computes."""
        part = width // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchange [1, H, T / size, D], this rank's tokens, for [1, H' / size, T, D], its heads of all tokens.

        H' is H, or where `size` does not divide it the least common multiple, each head several times in a row.
        """
        heads = tensor[0].repeat_interleave(math.lcm(tensor.shape[1], self.size) // tensor.shape[1], dim=0)
        parts = _Exchange.apply(heads.unflatten(0, (self.size, -1)), self.handle)
        return parts.transpose(0, 1).flatten(1, 2)[None]

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Exchange [1, H / size, T, D], this rank's heads of all tokens, for [1, H, T / size, D], its tokens."""
        parts = _Exchange.apply(tensor[0].unflatten(1, (self.size, -1)).transpose(0, 1), self.handle)
        return parts.flatten(0, 1)[None]

    def whole(self, values: Tensor, first: int, count: int) -> Tensor:
        """Put the numbers of all ranks together, [count], given this rank's [n], which begin at `first`.

        Each rank's gradient is that of its own numbers: with the same loss on all ranks, the gradients of parameters
        add up to those of one rank that has computed the row alone.
        """
        return _Whole.apply(values, first, count, self.handle)


def sequence_group(world: World, size: int, timeout_s: float) -> SequenceGroup | None:
    """Form groups of `size` neighbouring ranks, and return this rank's; None for size 1. Collective.

    Raises ConfigError if the ranks are no multiple of it.
    """
    if size == 1:
        return None
    if world.size % size:
        raise ConfigError(
            f"ds.ulysses_size = {size} does not divide the {world.size} ranks of this model: start a multiple of it"
        )
    timeout = timedelta(seconds=timeout_s)
    starts = range(0, world.size, size)
    groups: list[Any] = [dist.new_group([*range(first, first + size)], timeout=timeout) for first in starts]
    return SequenceGroup(world.rank % size, size, groups[world.rank // size])


class _Exchange(torch.autograd.Function):
    """Sends part i of a tensor [size, ...] to rank i, and gets the parts for this rank, by the ranks they are from."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Exchange.apply(grad, ctx.group), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, first: int, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.mine = slice(first, first + len(values))
        whole = values.new_zeros(count)
        whole[ctx.mine] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.mine], None, None, None

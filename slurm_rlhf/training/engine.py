"""DeepSpeed behind a small surface: token-exact accumulation over micro-batches and ranks, one optimizer step, resume.

A loss that is a sum over this rank's tokens divided by the token count of the whole optimizer step has, summed over
micro-batches and ranks, the gradient of the mean over all tokens. DeepSpeed averages over ranks, so each loss is
multiplied by their number; gradient_accumulation_steps stays 1 and the boundary is set by hand, so that the number of
micro-batches can differ from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.errors import CheckpointError, RunError
from slurm_rlhf.training.deepspeed_engine import EngineConfig, start_deepspeed
from slurm_rlhf.training.distributed import World
from slurm_rlhf.training.offload import park, unpark
from slurm_rlhf.training.optimizer_fragments import (
    Fragment,
    fragments_to_fill,
    local_fragments,
    make_moments,
    publish,
    sizes,
)
from slurm_rlhf.training.schedule import learning_rate
from slurm_rlhf.training.shard_files import ShardReader, write_shard


@dataclass(frozen=True, slots=True)
class StepStats:
    grad_norm: float  # before clipping
    lr: float


class TrainEngine:
    """`module` under DeepSpeed with AdamW, on the process group joined by `join_world`."""

    def __init__(self, module: nn.Module, cfg: EngineConfig, world: World) -> None:
        self.cfg = cfg
        self.world = world
        self.steps = 0  # optimizer steps taken
        self.module = module
        self._engine = start_deepspeed(module, cfg, world)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, through the engine (ZeRO-3 gathers parameters there)."""
        return self._engine(*args, **kwargs)

    def accumulate(self, loss: Tensor, is_last: bool) -> None:
        """Backward. Collective: every rank calls it as often, and with `is_last` once per optimizer step, last."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self.world.size)

    def step(self) -> StepStats:
        """Clip and update. Raises RunError when the gradient is not finite; the parameters are then untouched."""
        lr = learning_rate(self.steps, self.cfg.schedule)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        norm = self._plain_norm()
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm()) if norm is None else norm
        if not math.isfinite(norm):
            self._raise_not_finite()
        self.steps += 1
        return StepStats(norm, lr)

    def fragments(self, part: nn.Module) -> Iterator[Fragment]:
        """This rank's fp32 masters of `part` of the module, named as in `part`; live memory. Not collective."""
        return local_fragments(part, self._engine.optimizer, self.world)

    def sleep(self) -> None:
        """Keep the optimizer's states in host memory until `wake_up`. No other call may come in between but reads."""
        park(self._engine, self.cfg.zero_stage)

    def wake_up(self) -> None:
        """Bring the optimizer's states back to the device."""
        unpark(self._engine, self.cfg.zero_stage, self.world.device)

    def save(self, directory: Path) -> None:
        """Write everything that shapes the next steps. Collective: every rank calls it with the same directory."""
        optimizer = self._engine.optimizer
        write_shard(directory, self.world.rank, local_fragments(self.module, optimizer, self.world))
        cuda = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        state = {"steps": self.steps, "sizes": sizes(self.module), "rng": torch.get_rng_state(), "cuda_rng": cuda}
        torch.save(state, _rank_file(directory, self.world.rank))
        torch.distributed.barrier()

    def load(self, directory: Path) -> None:
        """Continue where `save` was called, by as many ranks as now or by others, under any ZeRO stage. Collective.

        With as many ranks and the same stage the next steps are bit for bit those that would have followed; otherwise
        they differ by the order in which ranks add up gradients. Ranks that were not there keep the random state that
        `seed_rank` gave them. Raises CheckpointError for another model's checkpoint and a damaged one.
        """
        state = self._read_state(directory)
        optimizer = self._engine.optimizer
        if state["steps"]:
            make_moments(optimizer, state["steps"])
        reader = ShardReader(directory, self.world.rank)
        for fragment in fragments_to_fill(self.module, optimizer):
            reader.fill(fragment)
        publish(optimizer)
        self.steps = state["steps"]
        if state["own"]:
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_rng"])

    def _read_state(self, directory: Path) -> dict[str, Any]:
        """What the rank of this number has written beside its shard; rank 0's, and "own" False, if there was none."""
        own = _rank_file(directory, self.world.rank)
        path = own if own.is_file() else _rank_file(directory, 0)
        if not path.is_file():
            raise CheckpointError(f"{directory}: no {path.name}. It is not a checkpoint of this role.")
        state: dict[str, Any] = torch.load(path, weights_only=True)
        saved, ours = state.get("sizes"), sizes(self.module)
        if saved is None:
            raise CheckpointError(f"{directory} was written by an earlier version, whose checkpoints this cannot read.")
        for name in sorted(saved.keys() | ours.keys()):
            if saved.get(name) != ours.get(name):
                raise CheckpointError(
                    f"{directory} is of another model: parameter {name} has {saved.get(name, 0)} elements in it and "
                    f"{ours.get(name, 0)} here. Resume with the model it was trained from."
                )
        return {**state, "own": path == own}

    def _plain_norm(self) -> float | None:
        """ZeRO-0 is plain AdamW inside DeepSpeed: it neither reports the norm nor stops at NaN."""
        if self.cfg.zero_stage > 0:
            return None
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(grads))
        if not math.isfinite(norm):
            self._raise_not_finite()
        return norm

    def _raise_not_finite(self) -> None:
        raise RunError(
            f"the gradient of optimizer step {self.steps} is not finite; the parameters were not changed. "
            "Usual causes: a learning rate that is too high, or rewards out of range (see reward.clip_range)."
        )


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.pt"

"""DeepSpeed behind a small surface: token-exact accumulation over micro-batches and ranks, one optimizer step, resume.

A loss that is a sum over this rank's tokens divided by the token count of the whole optimizer step has, summed over
micro-batches and ranks, the gradient of the mean over all tokens. DeepSpeed averages over ranks, so each loss is
multiplied by their number; gradient_accumulation_steps stays 1 and the boundary is set by hand, so that the number of
micro-batches can differ from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.errors import CheckpointError, RunError
from slurm_rlhf.training.distributed import World
from slurm_rlhf.training.schedule import learning_rate
from slurm_rlhf.training.zero import EngineConfig, start_deepspeed

TAG = "deepspeed"


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

    def save(self, directory: Path) -> None:
        """Write everything that shapes the next steps. Collective: every rank calls it with the same directory."""
        self._engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        cuda = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        state = {
            "steps": self.steps,
            "world": self.world.size,
            "zero_stage": self.cfg.zero_stage,
            "param_dtype": self.cfg.param_dtype,
            "rng": torch.get_rng_state(),
            "cuda_rng": cuda,
        }
        torch.save(state, self._rank_file(directory))
        torch.distributed.barrier()

    def load(self, directory: Path) -> None:
        """Continue where `save` was called. Collective. Raises CheckpointError for another run's layout."""
        path = self._rank_file(directory)
        if not path.is_file():
            raise CheckpointError(
                f"{directory}: no {path.name}. It is not a checkpoint of this role, or one of fewer ranks; "
                f"resume with as many ranks as it was saved with ({len(list(directory.glob('rank_*.pt')))})."
            )
        state = torch.load(path, weights_only=True)
        ours = {"world": self.world.size, "zero_stage": self.cfg.zero_stage, "param_dtype": self.cfg.param_dtype}
        for name, value in ours.items():
            if state[name] != value:
                raise CheckpointError(
                    f"{directory}: saved with {name} {state[name]}, this run has {value}. Resume with the same."
                )
        loaded, _ = self._engine.load_checkpoint(str(directory), tag=TAG)
        if loaded is None:
            raise CheckpointError(
                f"{directory}: DeepSpeed found no state in {directory / TAG}. Use another checkpoint."
            )
        self.steps = state["steps"]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])

    def _rank_file(self, directory: Path) -> Path:
        return directory / f"rank_{self.world.rank:05d}.pt"

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

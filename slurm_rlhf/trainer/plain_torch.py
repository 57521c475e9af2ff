"""A model in training under plain PyTorch: every rank has all of it, and the ranks add up their gradients.

Parameters are fp32; in bf16 and fp16 autocast computes. One process, or as many as the group has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_rlhf.placement.rank_memory import BUCKET
from slurm_rlhf.trainer.distributed import World, release_cache
from slurm_rlhf.trainer.optimizer_state import HOST, Fragment, move_moments, whole_fragments, zero_moments
from slurm_rlhf.trainer.trainer import DTYPES, Trainer, TrainSettings, adamw


class PlainTrainer(Trainer):
    """Trains with nothing but torch."""

    def __init__(self, module: nn.Module, cfg: TrainSettings, world: World) -> None:
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        super().__init__(module.to(world.device), cfg, world, shapes, sharded=False)
        self.optimizer = adamw(self.module, shapes, cfg, world.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.cfg.autocast
        with torch.autocast(self.world.device.type, dtype, dtype is not None):
            return self.module(*args, **kwargs)

    def accumulate(self, loss: Tensor, last: bool) -> None:
        (self._checked(loss) * (self._scale.scale if self._scale else 1.0)).backward()
        if last and self.world.size > 1:
            self._add_up_gradients()

    def shards(self, part: nn.Module, kind: Literal["parameters", "optimizer"]) -> Iterator[Fragment]:
        if kind == "optimizer":
            return whole_fragments(part, self.optimizer, self.world)
        return (Fragment(name, 0, {"parameter": tensor.reshape(-1)}) for name, tensor in self.gathered(part))

    def gathered(self, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in part.named_parameters())

    def move(self, where: Literal["host", "device"]) -> None:
        device = HOST if where == "host" else self.world.device
        for state in self.optimizer.state.values():
            move_moments(state, device)
        release_cache()

    def _update(self) -> float:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        if self._scale:
            for grad in grads:
                grad.mul_(1.0 / self._scale.scale)
        total = nn.utils.get_total_norm(grads)
        norm = float(total)
        if 0.0 < self.cfg.config.actor.max_norm < norm:
            nn.utils.clip_grads_with_norm_(parameters, self.cfg.config.actor.max_norm, total)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _fill(self, steps: int, fill: Callable[[Fragment], None]) -> None:
        if steps:
            zero_moments(self.optimizer, (p for p in self.module.parameters() if p.requires_grad), steps)
        for fragment in whole_fragments(self.module, self.optimizer):
            fill(fragment)

    def _add_up_gradients(self) -> None:
        """Sum the gradients over the ranks, in buckets; a missing one, as of an expert without tokens, counts as 0."""
        dtype = DTYPES[self.cfg.config.ds.grad_comm_dtype]
        before, numbered = 0, []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                numbered.append((before // BUCKET, parameter))
                before += parameter.numel()
        for _, bucket in groupby(numbered, key=lambda pair: pair[0]):
            grads = []
            for _, parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads.append(parameter.grad)
            flat = torch.cat([grad.flatten().to(dtype) for grad in grads])
            dist.all_reduce(flat)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

"""What the optimizer steps of a model depend on: learning rate, ZeRO stage, precision and AdamW's settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slurm_rlhf.config.schema import Config, Ds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Defines the learning rate as a function of the optimizer step: a checkpoint has to hold the step only."""

    kind: str  # constant, linear or cosine
    peak: float
    total_steps: int
    warmup_ratio: float = 0.0  # share of total_steps
    min_ratio: float = 0.0  # share of peak at which linear and cosine end

    @classmethod
    def of(cls, config: Config, peak: float, total_steps: int, kind: str = "") -> Schedule:
        """Read warm-up and end from the actor's settings, which all models share, and the kind unless it is given."""
        actor = config.actor
        return cls(kind or actor.lr_scheduler, peak, total_steps, actor.lr_warmup_ratio, actor.lr_min_ratio)


def learning_rate(step: int, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step `step`, 0-based.

    Warm-up over w = ceil(warmup_ratio * total_steps) steps: peak * (step + 1) / w. After it, with
    p = (step - w) / max(total_steps - w - 1, 1), at most 1:
        constant  peak
        linear    peak * (min_ratio + (1 - min_ratio) * (1 - p))
        cosine    peak * (min_ratio + (1 - min_ratio) * (1 + cos(pi * p)) / 2)
    so that the first step after the warm-up has the peak and the last step peak * min_ratio. Steps past the end keep
    the last value. Source of the cosine: Loshchilov and Hutter, SGDR (2017), one period.
    """
    warmup = math.ceil(schedule.warmup_ratio * schedule.total_steps)
    if step < warmup:
        return schedule.peak * (step + 1) / warmup
    progress = min((step - warmup) / max(schedule.total_steps - warmup - 1, 1), 1.0)
    if schedule.kind == "constant":
        share = 1.0
    elif schedule.kind == "linear":
        share = 1.0 - progress
    else:
        share = (1.0 + math.cos(math.pi * progress)) / 2.0
    return schedule.peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * share)


class TrainSettings:
    """Holds the settings of the optimizer steps of a model; all trained models share the actor's."""

    def __init__(self, config: Config, schedule: Schedule, ranks: int) -> None:
        """`schedule`: learning rate by step. `ranks`: of the optimizer, which decide about its ZeRO stage."""
        self.config, self.schedule = config, schedule
        self.zero_stage = stage_of(config, ranks)  # 0: plain PyTorch trains the model

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the 16 bits that a model with fp32 parameters computes in, as at stage 0; None: no autocast."""
        dtype = self.config.ds.param_dtype
        return None if self.zero_stage or dtype == "fp32" else DTYPES[dtype]


def stage_of(config: Config, ranks: int) -> int:
    """Choose the ZeRO stage of an optimizer over `ranks`: 0 where stages 1 and 2 would have nothing to do but copy.

    On one rank in fp32 they cut nothing and keep no masters, and pass every gradient through buffers: a seventh of the
    update of a small model. With ds.enable_sleep they stay, and with train.full_determinism, as stage 0 rounds the norm
    of gradients otherwise than a checkpoint's run did.
    """
    ds = config.ds
    idle = ranks == 1 and ds.zero_stage in (1, 2) and ds.param_dtype == "fp32" and not ds.enable_sleep
    return 0 if idle and not config.train.full_determinism else ds.zero_stage


def stored_as(ds: Ds) -> Ds:
    """Return `ds` with the precision that parameters have: fp32 at stage 0, where autocast rounds in the forward."""
    return dataclasses.replace(ds, param_dtype="fp32") if ds.zero_stage == 0 else ds


def adamw(
    module: nn.Module, shapes: Mapping[str, torch.Size], cfg: TrainSettings, device: torch.device
) -> torch.optim.AdamW:
    """Make torch's AdamW for a module on `device`, whose whole parameters have `shapes`.

    It is fused, as by default torch takes parameters through ten kernels, on CPUs one after the other; but not with
    train.full_determinism, where it may round differently from a checkpoint's run.
    """
    actor = cfg.config.actor
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for _, p in named], "weight_decay": 0.0}]
    if actor.weight_decay:
        matrices = [p for name, p in named if len(shapes[name]) >= 2]
        rest = [p for name, p in named if len(shapes[name]) < 2]
        groups = [{"params": matrices, "weight_decay": actor.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    first, second = actor.adam_betas
    fused = None if cfg.config.train.full_determinism else True
    return torch.optim.AdamW(groups, lr=cfg.schedule.peak, betas=(first, second), fused=fused)

"""DeepSpeed's engine for a module: settings, learning rate, optimizer, and models that ZeRO-3 shards as they load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.training._deepspeed import full_shape, import_deepspeed, switch_off_scaler
from slurm_rlhf.training._torch import limit_collectives
from slurm_rlhf.training._transformers import import_modeling, shard_new_models
from slurm_rlhf.training.distributed import World, local_device
from slurm_rlhf.training.optimizer_state import sizes


def import_trainers(deepspeed: bool) -> None:
    """Import what a model is loaded with and, with `deepspeed`, sharded and trained. No GPU is touched."""
    import_modeling()
    if deepspeed:
        import_deepspeed(local_device())


@dataclass(frozen=True, slots=True)
class Schedule:
    """Defines the learning rate as a function of the optimizer step: a checkpoint has to hold the step only."""

    kind: str  # constant, linear or cosine
    peak: float
    total_steps: int
    warmup_ratio: float = 0.0  # of total_steps
    min_ratio: float = 0.0  # of peak, where linear and cosine end

    @classmethod
    def of(cls, config: Config, peak: float, total_steps: int, kind: str = "") -> Schedule:
        """Read warm-up and end, and without `kind` that too, from the actor's settings, which all models share."""
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
    Raises ValueError for another kind.
    """
    warmup = math.ceil(schedule.warmup_ratio * schedule.total_steps)
    if step < warmup:
        return schedule.peak * (step + 1) / warmup
    progress = min((step - warmup) / max(schedule.total_steps - warmup - 1, 1), 1.0)
    if schedule.kind == "constant":
        share = 1.0
    elif schedule.kind == "linear":
        share = 1.0 - progress
    elif schedule.kind == "cosine":
        share = (1.0 + math.cos(math.pi * progress)) / 2.0
    else:
        raise ValueError(f"unknown schedule {schedule.kind!r}; constant, linear and cosine are known")
    return schedule.peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * share)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Holds what the optimizer steps of a model depend on, beside the model and the data."""

    zero_stage: int
    param_dtype: str  # "fp32", or "bf16" or "fp16" with fp32 master weights and fp32 gradient accumulation
    grad_comm_dtype: str  # "fp32" or "bf16": in which ranks add up their gradients
    betas: tuple[float, float]
    weight_decay: float  # of matrices; biases and norms do not decay
    max_norm: float  # global L2 norm of the gradient, 0: not clipped
    schedule: Schedule  # of the learning rate
    timeout_s: float  # of every collective
    ds: Ds  # of which the loss scale of fp16 is made
    most_skipped: int = 0  # steps in a row that are not finite, but in fp16
    fused: bool = True  # AdamW on CPUs

    @classmethod
    def of(cls, config: Config, schedule: Schedule, ranks: int) -> EngineConfig:
        """Read all but the schedule from the actor's settings, which all trained models share."""
        actor = config.actor
        return cls(
            zero_stage=stage_of(config, ranks),
            param_dtype=config.ds.param_dtype,
            grad_comm_dtype=config.ds.grad_comm_dtype,
            betas=(actor.adam_betas[0], actor.adam_betas[1]),
            weight_decay=actor.weight_decay,
            max_norm=actor.max_norm,
            schedule=schedule,
            timeout_s=config.timeout.collective,
            ds=config.ds,
            most_skipped=config.train.max_skipped_steps,
            fused=not config.train.full_determinism,  # it rounds otherwise than a checkpoint's run may have done
        )


def stage_of(config: Config, ranks: int) -> int:
    """Choose the ZeRO stage of an optimizer over `ranks`: 0 where stages 1 and 2 would have nothing to do but copy.

    On one rank in fp32 they cut nothing and keep no masters, and pass every gradient through buffers: a seventh of the
    update of a small model. With ds.enable_sleep they stay, as DeepSpeed moves no states of stage 0 to host memory, and
    with train.full_determinism, as stage 0 rounds the norm of gradients otherwise than a checkpoint's run did.
    """
    ds = config.ds
    idle = ranks == 1 and ds.zero_stage in (1, 2) and ds.param_dtype == "fp32" and not ds.enable_sleep
    return 0 if idle and not config.train.full_determinism else ds.zero_stage


def start_deepspeed(module: nn.Module, cfg: EngineConfig, world: World) -> Any:
    """Call `deepspeed.initialize` with AdamW over a module that was loaded under `loading`. Collective.

    Raises ConfigError for fp16 on a device where DeepSpeed has none.
    """
    deepspeed = import_deepspeed(world.device)
    if cfg.param_dtype == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        raise ConfigError("ds.param_dtype = fp16: DeepSpeed does not train in it on this device: use bf16 or fp32")
    optimizer = adamw(module, cfg, world.device)
    elements = sum(sizes(module).values())
    settings = deepspeed_config(cfg, elements, world.size)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    switch_off_scaler(engine)
    limit_collectives(cfg.timeout_s)
    return engine


def adamw(module: nn.Module, cfg: EngineConfig, device: torch.device) -> torch.optim.AdamW:
    """Make torch's AdamW for a module on `device`: DeepSpeed's own optimizers are extensions, which have to be built.

    With `cfg.fused` it is fused on CPUs, where torch by default takes a parameter after the other through ten kernels.
    On GPUs it stays as torch has it by default: all parameters together.
    """
    return torch.optim.AdamW(
        _groups(module, cfg.weight_decay),
        lr=cfg.schedule.peak,
        betas=cfg.betas,
        fused=True if cfg.fused and device.type == "cpu" else None,
    )


@contextmanager
def loading(ds: Ds, world: World) -> Iterator[Ds]:
    """Give the settings with which to load, inside the block, a model for `start_deepspeed`. Collective.

    DeepSpeed keeps fp32 masters beside 16-bit parameters from ZeRO-1 on. Without ZeRO it would add up gradients in
    16 bits, which loses small ones: there the parameters themselves are fp32, and autocast computes in 16 bits.
    ZeRO-3 shards the parameters while they are loaded.
    """
    with sharded_from_the_start(world, zero3_config(ds.param_dtype)) if ds.zero_stage == 3 else nullcontext():
        yield stored_as(ds)


def stored_as(ds: Ds) -> Ds:
    """Return `ds` with the precision that parameters have: fp32 at stage 0, where autocast rounds in the forward."""
    return dataclasses.replace(ds, param_dtype="fp32") if ds.zero_stage == 0 else ds


def deepspeed_config(cfg: EngineConfig, elements: int, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for training a model of `elements` parameters on `ranks` ranks.

    Stages 0 and 1 reduce gradients once per optimizer step, because every rank keeps the whole sum over its
    micro-batches. Stages 2 and 3 keep a rank's part of it only, so they reduce after the backward
    pass of each micro-batch. DeepSpeed can put off this reduction, too (`coalesce_grad_reduction`), at the cost of
    full gradients in memory and sums over micro-batches in bf16; with sums in fp32 that is what stage 1 does.
    """
    # Buffers of DeepSpeed's default size, 2 GB in fp32, would be allocated even for a tiny model.
    bucket = min(elements + elements % 2, 200_000_000)
    autocast = cfg.param_dtype != "fp32" and cfg.zero_stage == 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.max_norm if cfg.zero_stage else 0.0,  # at stage 0 `TrainEngine.step` clips
        "bf16": {"enabled": cfg.param_dtype == "bf16" and not autocast},
        # A fixed scale to DeepSpeed: `loss_scale.py` sets it anew before each step.
        "fp16": {"enabled": cfg.param_dtype == "fp16" and not autocast, "loss_scale": 1.0},
        "torch_autocast": {"enabled": autocast, "dtype": "float16" if cfg.param_dtype == "fp16" else "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": cfg.grad_comm_dtype,
        "zero_optimization": {
            "stage": cfg.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": cfg.zero_stage > 0 and ranks > 1,  # on a stream of its own, from two buckets in turns
            **(persistence(elements) if cfg.zero_stage == 3 else {}),
        },
        "steps_per_print": None,
    }


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: one when nothing decays, because DeepSpeed works group by group."""
    parameters = list(module.parameters())
    if weight_decay == 0.0:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if len(full_shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if len(full_shape(p)) < 2], "weight_decay": 0.0},
    ]


@contextmanager
def sharded_from_the_start(world: World, config: dict[str, Any]) -> Iterator[None]:
    """Have `from_pretrained`, inside the block, shard every parameter as it is made. Collective.

    Rank 0 reads the weights, one module at a time, and each rank keeps its shard: no rank ever has the full model.
    `config`: of `zero3_config`.
    """
    import_deepspeed(world.device)
    with shard_new_models(config):
        yield


def zero3_config(param_dtype: str, offload: bool = False, elements: int = 0) -> dict[str, Any]:
    """Return DeepSpeed's configuration for sharding a frozen model; with `offload`, into host memory.

    `param_dtype`: "fp32", "bf16" or "fp16". `elements`: of all parameters, once that is known.
    """
    where = {"offload_param": {"device": "cpu", "pin_memory": torch.cuda.is_available()}} if offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": param_dtype == "bf16"},
        "fp16": {"enabled": param_dtype == "fp16"},
        "zero_optimization": {"stage": 3, **persistence(elements), **where},
        "steps_per_print": None,
    }


def persistence(elements: int) -> dict[str, int]:
    """Return the size up to which parameters stay full on every rank, because gathering them does not pay.

    `elements`: of the model. DeepSpeed's default for all models is 100,000, which of a small one is most parameters.
    """
    return {"stage3_param_persistence_threshold": min(elements // 100, 100_000)}

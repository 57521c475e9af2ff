"""DeepSpeed's engine for a module: its configuration, its optimizer, and what has to be kept from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.training.distributed import World, limit_collectives
from slurm_rlhf.training.optimizer_fragments import sizes
from slurm_rlhf.training.parameters import whole_shape
from slurm_rlhf.training.schedule import Schedule
from slurm_rlhf.training.zero3_init import born_sharded, import_deepspeed, persistence, zero3_config


@dataclass(frozen=True, slots=True)
class EngineConfig:
    zero_stage: int
    param_dtype: str  # "fp32", or "bf16" with fp32 master weights and fp32 gradient accumulation
    grad_comm_dtype: str  # "fp32" or "bf16": in which ranks add up their gradients
    betas: tuple[float, float]
    weight_decay: float  # of matrices; biases and norms do not decay
    max_norm: float  # global L2 norm of the gradient, 0: not clipped
    schedule: Schedule  # of the learning rate
    timeout_s: float  # of every collective

    @classmethod
    def of_actor(cls, config: Config, learning_rate: float, total_steps: int) -> EngineConfig:
        """The actor's settings, which the critic shares but for the learning rate."""
        actor = config.actor
        return cls(
            zero_stage=config.ds.zero_stage,
            param_dtype=config.ds.param_dtype,
            grad_comm_dtype=config.ds.grad_comm_dtype,
            betas=(actor.adam_betas[0], actor.adam_betas[1]),
            weight_decay=actor.weight_decay,
            max_norm=actor.max_norm,
            schedule=Schedule(
                actor.lr_scheduler, learning_rate, total_steps, actor.lr_warmup_ratio, actor.lr_min_ratio
            ),
            timeout_s=config.timeout.collective,
        )


def start_deepspeed(module: nn.Module, cfg: EngineConfig, world: World) -> Any:
    """`deepspeed.initialize` with AdamW over the module's parameters, loaded under `loading`. Collective."""
    deepspeed = import_deepspeed(world.device)
    # torch's AdamW: DeepSpeed's own optimizers are extensions, too.
    optimizer = torch.optim.AdamW(_groups(module, cfg.weight_decay), lr=cfg.schedule.peak, betas=cfg.betas)
    elements = sum(sizes(module).values())
    settings = deepspeed_config(cfg, elements, world.size)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    limit_collectives(cfg.timeout_s)
    return engine


@contextmanager
def loading(ds: Ds, world: World) -> Iterator[Ds]:
    """Within it, and with the settings it gives, load the model that `start_deepspeed` is to train. Collective.

    DeepSpeed keeps fp32 masters beside bf16 parameters from ZeRO-1 on. Without ZeRO it would add up gradients in
    bf16, which loses small ones: there the parameters themselves are fp32, and autocast computes in bf16.
    ZeRO-3 cuts the parameters while they are loaded.
    """
    with born_sharded(world, zero3_config(ds.param_dtype)) if ds.zero_stage == 3 else nullcontext():
        yield computed_as(ds)


def computed_as(ds: Ds) -> Ds:
    """`ds` with the precision that parameters have: fp32 at stage 0, where autocast rounds in the forward pass."""
    return dataclasses.replace(ds, param_dtype="fp32") if ds.zero_stage == 0 else ds


def deepspeed_config(cfg: EngineConfig, elements: int, ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of `elements` parameters on `ranks` ranks.

    Stages 0 and 1 reduce gradients once per optimizer step, because every rank keeps the whole sum over its
    micro-batches. Stages 2 and 3 keep a rank's part of it only, so they reduce each micro-batch's: behind its backward
    pass. DeepSpeed can put off their reduction, too (`coalesce_grad_reduction`), at the memory of whole gradients and
    with sums over micro-batches in bf16; with sums in fp32 that is what stage 1 is.
    """
    # Buffers of DeepSpeed's default size, 2 GB in fp32, would be allocated even for a tiny model.
    bucket = min(elements + elements % 2, 200_000_000)
    bf16 = cfg.param_dtype == "bf16"
    autocast = bf16 and cfg.zero_stage == 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.max_norm,
        "bf16": {"enabled": bf16 and not autocast},
        "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
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
    """AdamW's parameter groups. One when nothing decays: DeepSpeed works group by group."""
    parameters = list(module.parameters())
    if weight_decay == 0.0:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if len(whole_shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]

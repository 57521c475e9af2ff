"""The implementations of `Trainer`, and which one a model gets: no other file but theirs names one.

To add one: write its file, and say here which models get it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.trainer._deepspeed import import_deepspeed, is_sharded
from slurm_rlhf.trainer._transformers import import_modeling
from slurm_rlhf.trainer.deepspeed import (
    DeepSpeedTrainer,
    gathering,
    sharded_from_the_start,
    start_sharded,
    zero3_config,
)
from slurm_rlhf.trainer.distributed import World, local_device
from slurm_rlhf.trainer.plain_torch import PlainTrainer
from slurm_rlhf.trainer.trainer import DTYPES, Trainer, TrainSettings, stage_of, stored_as

__all__ = ["gathering", "import_trainers", "is_sharded", "loading", "start_sharded", "start_trainer"]


def import_trainers(config: Config, role: str, ranks: int) -> None:
    """Import what `role` loads its model with and, where it needs it, what shards and trains it. No GPU is touched."""
    import_modeling()
    spec = ROLES[role]
    whole = spec.settings(config).zero_stage != 3 if spec.kind == "frozen" else stage_of(config, ranks) == 0
    if not whole:
        import_deepspeed(local_device())


def start_trainer(module: nn.Module, cfg: TrainSettings, world: World) -> Trainer:
    """Make the trainer of a module that was loaded under `loading`. Collective. Raises ConfigError, RunError."""
    return (DeepSpeedTrainer if cfg.zero_stage else PlainTrainer)(module, cfg, world)


@contextmanager
def loading(ds: Ds, world: World) -> Iterator[Ds]:
    """Yield the settings for loading, inside the block, a model for `start_trainer`. Collective.

    From ZeRO-1 on 16-bit parameters have fp32 masters. Without ZeRO gradients would be added up in 16 bits,
    which loses small ones: there the parameters themselves are fp32, and autocast computes in 16 bits.
    ZeRO-3 shards the parameters while they are loaded.
    """
    config, dtype = zero3_config(ds.param_dtype, hpz_size=ds.hpz_size), DTYPES[ds.param_dtype]
    autocast = torch.autocast(world.device.type, dtype, ds.zero_stage == 0 and ds.param_dtype != "fp32")
    with sharded_from_the_start(world, config) if ds.zero_stage == 3 else nullcontext(), autocast:
        yield stored_as(ds)

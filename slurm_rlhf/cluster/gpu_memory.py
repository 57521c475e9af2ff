"""Estimate whether a run fits the memory of the GPUs that it has here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from slurm_rlhf.cluster.gpu_query import local_kinds
from slurm_rlhf.cluster.slurm_job import granted_types
from slurm_rlhf.config.model_directory import check_tensor_parallel
from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.placement.gpus import TELL, GpuSize, found_size, size_by_keys
from slurm_rlhf.placement.memory import Account, Models, account, read_models
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU


@dataclass(frozen=True, slots=True)
class Memory:
    """Hold the memory estimate; without one, `unknown` says why."""

    size: GpuSize
    unknown: str = ""
    account: Account | None = None
    models: Models | None = None


def memory_of(config: Config, found: GpuSize | None) -> Memory:
    """Estimate the memory of a run on the GPUs that the user names, or else on those `found`.

    Raises ConfigError for an unknown kind of GPU, and for a tensor-parallel size that does not divide the model.
    """
    size = size_by_keys(config.train.gpu, config.train.gpu_memory_gb) or found
    if size is None:
        return Memory(GpuSize(0), f"there are no GPUs here; to estimate it for a machine with GPUs, add {TELL}")
    if not size.memory:
        return Memory(size, "; ".join(size.notes))
    try:
        models = read_models(config)
    except ModelError as error:
        return Memory(size, str(error))
    actor = config.actor.model_name_or_path
    if has_engines(config):
        check_tensor_parallel("actor.model_name_or_path", actor, config.vllm.tensor_parallel_size)
    return Memory(size, "", account(config, models, size.memory), models)


def memory_on(config: Config, ranks: RankMap) -> Memory:
    """Estimate as `memory_of`, on the GPUs of this machine or its allocation, if the ranks use any.

    Blocks for up to a minute if nothing answers.
    """
    on_gpus = ranks.topology.accelerator == GPU
    return memory_of(config, _found() if on_gpus else None)


def fits_gpus(config: Config) -> bool:
    """Tell whether a run is not known to be too large for the GPUs of this machine or its allocation.

    Blocks for up to a minute, the first time, if nothing answers.
    """
    found = memory_of(config, _found_once()).account
    return found is None or found.fits()


def _found() -> GpuSize:
    return found_size(local_kinds(os.environ), granted_types(os.environ))


_found_once = cache(_found)
"""For a run that goes on: its nodes keep their GPUs."""

"""The private parts of DeepSpeed that this package uses, written for deepspeed 0.19.8.

accelerator/cuda_accelerator.py CUDA_Accelerator.available_memory(self, device_index)
ops/__init__.py _probe_compatible_ops()
runtime/compiler.py compile
runtime/compiler.py dummy_decorator(func)
runtime/zero/offload_config.py OffloadStateTypeEnum
runtime/zero/offload_config.py OffloadStateTypeEnum.optim_states
runtime/zero/offload_config.py OffloadStateTypeEnum.hp_params
runtime/zero/partition_parameters.py param.ds_id
runtime/zero/partition_parameters.py param.ds_shape
runtime/zero/partition_parameters.py param.ds_numel
runtime/zero/partition_parameters.py param.ds_tensor
runtime/zero/partition_parameters.py param.all_gather
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.override_loss_scale(self, loss_scale)
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.fp32_partitioned_groups_flat
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.grad_position
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.get_param_id(self, param)
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank(self, param)
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3._partition_all_parameters(self)
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters(self, sub_group_id)
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor(self)
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.persistent_parameters
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.grad_partitions_flat_buffer
runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.ipg_buckets
runtime/zero/stage3.py IPGBucketZ3.buffer
runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.single_partition_of_fp32_groups
runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.update_lp_params(self)
runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.override_loss_scale(self, loss_scale)
runtime/bf16_optimizer.py BF16_Optimizer.fp32_groups_flat_partition
runtime/bf16_optimizer.py BF16_Optimizer.update_lp_params(self)
utils/mixed_precision_linkage.py lp_param._hp_mapping
utils/tensor_fragment.py tensor_fragment.lp_fragment_address
utils/tensor_fragment.py tensor_fragment.hp_fragment_address
utils/tensor_fragment.py tensor_fragment.param_group_index
utils/tensor_fragment.py fragment_address.start
utils/tensor_fragment.py fragment_address.numel
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for `device`, and return it."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # its own detection warns where there is no GPU
    import deepspeed
    import deepspeed.ops

    # No extension is used, so DeepSpeed must not look for any: _probe_compatible_ops runs compilers and asks the GPUs.
    # On CPUs it would lead to the build of deepspeed_shm_comm (half a minute of g++), whose shared memory has the same
    # names in all runs on a host; gloo all-reduces without it.
    deepspeed.ops.__compatible_ops__ = {}
    accelerator = deepspeed.accelerator.get_accelerator()
    if device.type == "cpu":
        # DeepSpeed asks for a CPU with fp16 instructions; torch computes fp16 on every CPU, slowly without them.
        accelerator.is_fp16_supported = lambda: True
    else:
        # DeepSpeed's own takes CUDA_VISIBLE_DEVICES for numbers, and dies of a UUID in it.
        accelerator.available_memory = lambda device_index=None: torch.cuda.mem_get_info(device_index)[0]
    _import_muon()
    return deepspeed


def _import_muon() -> None:
    """Import DeepSpeed's Muon, against which it checks the class of every optimizer, without compiling it.

    DeepSpeed's own import loads torch's compiler, which is a fifth of the start time of a rank that trains.
    """
    from deepspeed.runtime import compiler

    compile_, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_


# --- parameters ------------------------------------------------------------------------------------------------------


def is_sharded(parameter: Tensor) -> bool:
    """Return whether ZeRO-3 has sharded the parameter."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> torch.Size:
    """Return the shape of the full parameter; the `shape` of a sharded one says that it is empty."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def local_shard(parameter: Any, rank: int) -> tuple[int, Tensor]:
    """Return (index of its first element in the flat parameter, elements [n]) of the shard that this `rank` has.

    DeepSpeed pads the shards to the same size on every rank; the padding is left out.
    """
    shard = parameter.ds_tensor
    first = rank * shard.ds_numel
    count = max(0, min(shard.ds_numel, parameter.ds_numel - first))
    return min(first, parameter.ds_numel), shard.detach().flatten()[:count]


# --- optimizer -------------------------------------------------------------------------------------------------------


def masters(optimizer: Any) -> list[Tensor]:
    """Return the fp32 tensors that AdamW updates, one for each group."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(list(getattr(optimizer, name)) for name in names if hasattr(optimizer, name))


def master_range(parameter: Any, optimizer: Any) -> tuple[int, int, int, int]:
    """Return where this rank's elements of `parameter`, a trained one, are.

    (index in `masters`, first element in that master, first element in the flat parameter, how many: 0 if it has none)
    """
    if is_sharded(parameter):
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = length * optimizer._get_param_partition_rank(parameter)
        return group, offset, start, max(0, min(length, parameter.ds_numel - start))  # without padding
    mapping = parameter._hp_mapping
    if mapping is None:  # all of it is on other ranks
        return 0, 0, 0, 0
    # Not `mapping.optim_fragment`: DeepSpeed links it after the first group's first step, before others have state.
    at = mapping.hp_fragment_address
    return mapping.param_group_index, at.start, mapping.lp_fragment_address.start, at.numel


def copy_masters_to_parameters(optimizer: Any) -> None:
    """Update the parameters that the model computes with from the fp32 masters. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.invalidate_secondary_tensor()
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    else:
        optimizer.update_lp_params()


def set_loss_scale(optimizer: Any, scale: float) -> None:
    """Have a ZeRO optimizer multiply losses by `scale`, and divide by it in its step.

    Its own scheme doubles the scale between the backward pass and the step, which halves the gradient of that step.
    """
    optimizer.override_loss_scale(scale)


def gradient_buffers(optimizer: Any) -> list[Tensor]:
    """Return ZeRO-3's gradient buffers: this rank's part of the gradients, and the buckets that add them up."""
    return [optimizer.grad_partitions_flat_buffer, *(bucket.buffer for bucket in optimizer.ipg_buckets.values())]


def optimizer_states() -> list[Any]:
    """Return DeepSpeed's names of AdamW's moments and the fp32 masters."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    return [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]

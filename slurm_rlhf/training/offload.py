"""Device memory of a trainer that it does not need while others use the device."""

from __future__ import annotations

from typing import Any

import torch

from slurm_rlhf.training.optimizer_fragments import MOMENTS, masters

HOST = torch.device("cpu")


def release_cache() -> None:
    """Give the memory that PyTorch keeps for later back to the GPU. Returns at once where there is none."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def park(engine: Any, stage: int) -> None:
    """Move the fp32 masters and AdamW's moments of a DeepSpeed engine, ZeRO-2 or -3, to host memory. Blocks.

    Between two steps gradients mean nothing: their memory is given back. The bf16 parameters stay: the next thing that
    happens to them is that the engines get them.
    """
    if stage == 3:
        _move(engine.optimizer, HOST)
        for buffer in _gradients(engine.optimizer):
            buffer.untyped_storage().resize_(0)
    else:
        engine.offload_states(include=_states(), pin_memory=True)
    release_cache()


def unpark(engine: Any, stage: int, device: torch.device) -> None:
    """Bring back to `device` what `park` has moved. Blocks."""
    if stage == 3:
        _move(engine.optimizer, device)
        for buffer in _gradients(engine.optimizer):
            # In place, because DeepSpeed's views of it stay; zeros, because padding is never written and is summed up.
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()
    else:
        engine.reload_states()


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    """What ZeRO-3 keeps of gradients: this rank's part of them, and the buckets that they are added up in."""
    return [optimizer.grad_partitions_flat_buffer, *(bucket.buffer for bucket in optimizer.ipg_buckets.values())]


def _move(optimizer: Any, device: torch.device) -> None:
    """DeepSpeed moves these under ZeRO-3 for its own FusedAdam only, and it does it in the same way."""
    for master in masters(optimizer):
        master.data = _at(master.data, device)
        state = optimizer.optimizer.state.get(master, {})
        for moment in MOMENTS:
            if moment in state:
                state[moment].data = _at(state[moment].data, device)


def _at(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=device.type == "cpu")
    return target.copy_(tensor)


def _states() -> Any:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    return [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]

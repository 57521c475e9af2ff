"""AdamW's state and its fp32 masters: the fragments of them that this rank owns, and moving them to host memory.

DeepSpeed cuts one flat buffer per parameter group (ZeRO-1 and -2) or every parameter by itself (ZeRO-3), each with
padding at its end that depends on the number of ranks. A fragment says which elements of a named parameter they are,
so that what one layout has written another can read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.training._deepspeed import (
    copy_masters_to_parameters,
    full_shape,
    gradient_buffers,
    master_range,
    masters,
    optimizer_states,
)
from slurm_rlhf.training.distributed import World, release_cache

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state for each element
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + n) of parameter `name`, in row-major order."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # "fp32", and MOMENTS once a step was taken: fp32 [n] each, the live memory


def sizes(module: nn.Module) -> dict[str, int]:
    """Count the elements of every trained parameter; tied parameters appear once."""
    return {name: full_shape(p).numel() for name, p in module.named_parameters() if p.requires_grad}


def local_fragments(module: nn.Module, optimizer: Any, world: World) -> Iterator[Fragment]:
    """Yield this rank's fragments under DeepSpeed's `optimizer`; those of all ranks cover every parameter.

    Replicated state (ZeRO-0) is divided by whole parameters, so that every rank has a part to write.
    """
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for number, (name, parameter) in enumerate(trained):
        at = master_range(parameter, optimizer)
        if at is None:
            if number % world.size == world.rank:
                yield _whole(name, parameter, optimizer)
        elif at.length:
            master = masters(optimizer)[at.group]
            state = optimizer.optimizer.state.get(master, {})
            yield Fragment(name, at.start, _tensors(master, state, at.offset, at.length))


def fragments_to_fill(module: nn.Module, optimizer: Any) -> Iterator[Fragment]:
    """Yield all that this rank has to fill when it loads: under ZeRO-0 every parameter, else its own part."""
    yield from local_fragments(module, optimizer, World(0, 1, HOST))


def make_moments(optimizer: Any, steps: int) -> None:
    """Give AdamW zero moments as after `steps` steps, which it would make in its first."""
    adamw = getattr(optimizer, "optimizer", optimizer)
    for master in masters(optimizer):
        moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
        adamw.state[master] = {**moments, "step": torch.tensor(float(steps))}


def publish(optimizer: Any) -> None:
    """Make the model compute with the masters that were filled. Collective."""
    copy_masters_to_parameters(optimizer)


def _whole(name: str, parameter: Tensor, optimizer: Any) -> Fragment:
    state = optimizer.state.get(parameter, {})
    if optimizer.state and not state:  # it never had a gradient
        state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
    return Fragment(name, 0, _tensors(parameter, state, 0, parameter.numel()))


def _tensors(master: Tensor, state: dict[str, Tensor], offset: int, length: int) -> dict[str, Tensor]:
    named = {"fp32": master, **{key: state[key] for key in MOMENTS if key in state}}
    return {key: tensor.detach().view(-1).narrow(0, offset, length) for key, tensor in named.items()}


# --- in host memory --------------------------------------------------------------------------------------------------


def offload_optimizer(engine: Any, stage: int) -> None:
    """Move the fp32 masters and AdamW's moments of a DeepSpeed engine, ZeRO-2 or -3, to host memory. Blocks.

    The memory of gradients, which mean nothing between two steps, is freed. The bf16 parameters stay on the device:
    the weight sync that follows needs them.
    """
    if stage == 3:
        _move(engine.optimizer, HOST)
        for buffer in gradient_buffers(engine.optimizer):
            buffer.untyped_storage().resize_(0)
    else:
        engine.offload_states(include=optimizer_states(), pin_memory=True)
    release_cache()


def reload_optimizer(engine: Any, stage: int, device: torch.device) -> None:
    """Move what `offload_optimizer` has moved back to `device`. Blocks."""
    if stage == 3:
        _move(engine.optimizer, device)
        for buffer in gradient_buffers(engine.optimizer):
            # In place, because DeepSpeed's views of it stay; zeros, because padding is never written and is summed up.
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()
    else:
        engine.reload_states()


def _move(optimizer: Any, device: torch.device) -> None:
    """Move masters and moments. DeepSpeed moves them under ZeRO-3 for its own FusedAdam only, in the same way."""
    for master in masters(optimizer):
        master.data = _at(master.data, device)
        state = optimizer.optimizer.state.get(master, {})
        for moment in MOMENTS:
            if moment in state:
                state[moment].data = _at(state[moment].data, device)


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=device.type == "cpu")
    return target.copy_(tensor)

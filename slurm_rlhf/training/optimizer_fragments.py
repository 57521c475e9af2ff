"""The part of every parameter, and of AdamW's state for it, that this rank owns: the same view for every ZeRO stage.

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

from slurm_rlhf.training.distributed import World
from slurm_rlhf.training.parameters import is_sharded, whole_shape

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state for each element


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + n) of parameter `name`, in row-major order."""

    name: str
    start: int
    tensors: dict[str, Tensor]  # "fp32", and MOMENTS once a step was taken: fp32 [n] each, the live memory


def sizes(module: nn.Module) -> dict[str, int]:
    """Elements of every trained parameter, tied ones once."""
    return {name: whole_shape(p).numel() for name, p in module.named_parameters() if p.requires_grad}


def local_fragments(module: nn.Module, optimizer: Any, world: World) -> Iterator[Fragment]:
    """This rank's fragments under `optimizer`, DeepSpeed's; over all ranks they cover every parameter.

    Replicated state (ZeRO-0) is cut by whole parameters, so that every rank has a part to write.
    """
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for number, (name, parameter) in enumerate(trained):
        if is_sharded(parameter):
            yield from _of_zero3(name, parameter, optimizer)
        elif hasattr(parameter, "_hp_mapping"):
            yield from _of_flat_group(name, parameter, optimizer)
        elif number % world.size == world.rank:
            yield _whole(name, parameter, optimizer)


def fragments_to_fill(module: nn.Module, optimizer: Any) -> Iterator[Fragment]:
    """All that this rank has to fill when it loads: under ZeRO-0 every parameter, else its own part."""
    yield from local_fragments(module, optimizer, World(0, 1, torch.device("cpu")))


def make_moments(optimizer: Any, steps: int) -> None:
    """Give AdamW zero moments as after `steps` steps, which it would make in its first."""
    adamw = getattr(optimizer, "optimizer", optimizer)
    for master in masters(optimizer):
        moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
        adamw.state[master] = {**moments, "step": torch.tensor(float(steps))}


def publish(optimizer: Any) -> None:
    """Bring the parameters that the model computes with up to the fp32 masters. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


def masters(optimizer: Any) -> list[Tensor]:
    """The tensors that AdamW updates: one for each group of parameters, without ZeRO one for each parameter."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _of_zero3(name: str, parameter: Any, optimizer: Any) -> Iterator[Fragment]:
    group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = length * optimizer._get_param_partition_rank(parameter)
    length = min(length, parameter.ds_numel - start)  # the rest is padding
    master = masters(optimizer)[group]
    if length > 0:
        yield Fragment(name, start, _tensors(master, optimizer.optimizer.state.get(master, {}), offset, length))


def _of_flat_group(name: str, parameter: Any, optimizer: Any) -> Iterator[Fragment]:
    mapping = parameter._hp_mapping
    if mapping is not None:  # else all of it is other ranks'
        # Not `mapping.optim_fragment`: DeepSpeed links it after the first group's first step, before others have state.
        master, place = masters(optimizer)[mapping.param_group_index], mapping.hp_fragment_address
        tensors = _tensors(master, optimizer.optimizer.state.get(master, {}), place.start, place.numel)
        yield Fragment(name, mapping.lp_fragment_address.start, tensors)


def _whole(name: str, parameter: Tensor, optimizer: Any) -> Fragment:
    state = optimizer.state.get(parameter, {})
    if optimizer.state and not state:  # it never had a gradient
        state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
    return Fragment(name, 0, _tensors(parameter, state, 0, parameter.numel()))


def _tensors(master: Tensor, state: dict[str, Tensor], offset: int, length: int) -> dict[str, Tensor]:
    named = {"fp32": master, **{key: state[key] for key in MOMENTS if key in state}}
    return {key: tensor.detach().view(-1).narrow(0, offset, length) for key, tensor in named.items()}

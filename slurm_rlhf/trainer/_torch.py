"""The private parts of torch that this package uses, written for torch 2.13.0.

_C/_VariableFunctions.pyi _fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, *, scale, enable_gqa)
distributed/distributed_c10d.py _world
distributed/distributed_c10d.py _World.pg_map
distributed/distributed_c10d.py _set_pg_timeout(timeout, group)
nn/modules/module.py Module._parameters
nn/modules/module.py Module._modules
nn/modules/module.py Module._forward_hooks
nn/modules/module.py Module._forward_hooks_with_kwargs
nn/modules/module.py Module._forward_hooks_always_called
nn/modules/module.py Module._forward_pre_hooks
nn/modules/module.py Module._forward_pre_hooks_with_kwargs
nn/modules/module.py Module._backward_hooks
nn/modules/module.py Module._backward_pre_hooks
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional
from torch.nn.attention import SDPBackend

_seen: list[str] = []


def attention_kernel() -> str:
    """Name the attention kernel of the first forward pass after the first call, as in "sdpa: FLASH_ATTENTION".

    Empty until that pass, and for a model that does not use `scaled_dot_product_attention`, such as one with the
    package flash-attn.
    """
    _watch_once()
    return _seen[0] if _seen else ""


@cache
def _watch_once() -> None:
    original = functional.scaled_dot_product_attention

    def first(*args: Any, **kwargs: Any) -> Tensor:
        functional.scaled_dot_product_attention = original
        choice = torch._fused_sdp_choice(*args, **kwargs)
        names = {int(backend): name for name, backend in SDPBackend.__members__.items()}
        _seen.append(f"sdpa: {names.get(choice, choice)}")
        return original(*args, **kwargs)

    functional.scaled_dot_product_attention = first


def note_kernel(name: str) -> None:
    """Let `attention_kernel` name a kernel that is not called through `scaled_dot_product_attention`."""
    if not _seen:
        _seen.append(name)


def limit_collectives(timeout_s: float) -> None:
    """Give every process group of this process the time-out: libraries make their own groups with torch's default."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def without_hooks(module: Any) -> Any:
    """Return a shallow copy of `module` alone, whose call runs its forward and no hook."""
    copied = copy.copy(module)
    copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
    copied._forward_hooks_with_kwargs, copied._forward_pre_hooks_with_kwargs = OrderedDict(), OrderedDict()
    copied._forward_hooks_always_called = OrderedDict()
    copied._backward_hooks, copied._backward_pre_hooks = OrderedDict(), OrderedDict()
    return copied


def bare_copy(module: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter]) -> Any:
    """Copy a tree of modules without hooks: same buffers and settings, and the same parameters or their `replaced` one.

    A module or parameter that stands in several places does so in the copy. The copy has its own train or eval mode.
    """
    copies: dict[nn.Module, Any] = {}

    def copied(part: nn.Module) -> Any:
        if part not in copies:
            new = copies[part] = without_hooks(part)
            new._parameters = {
                name: parameter if parameter is None else replaced.get(parameter, parameter)
                for name, parameter in part._parameters.items()
            }
            new._modules = {name: child if child is None else copied(child) for name, child in part._modules.items()}
        return copies[part]

    whole = copied(module)
    for new in copies.values():
        for name, value in list(vars(new).items()):
            if isinstance(value, MethodType) and value.__self__ in copies:
                setattr(new, name, MethodType(value.__func__, copies[value.__self__]))
    return whole

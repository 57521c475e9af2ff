"""Models that are cut over the ranks by ZeRO-3 from the start: no rank ever holds one whole."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slurm_rlhf.training.distributed import World


def import_deepspeed(device: torch.device) -> Any:
    """The library, told what it would guess wrong."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # its own detection warns where there is no GPU
    import deepspeed
    import deepspeed.ops

    # On CPUs DeepSpeed compiles this extension (half a minute of g++) where a compiler is found. It all-reduces
    # through shared memory with names of its own, which runs on one host would share; gloo does without it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon()
    return deepspeed


def _import_muon() -> None:
    """Import the optimizer that DeepSpeed compares every other one with, without compiling it.

    DeepSpeed's own import of it brings in torch's compiler, which is a fifth of the start of a rank that trains.
    """
    from deepspeed.runtime import compiler

    compile_, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_


def zero3_config(param_dtype: str, offload: bool = False, elements: int = 0) -> dict[str, Any]:
    """DeepSpeed's configuration of a frozen model that is cut, "fp32" or "bf16", in host memory with `offload`.

    `elements`: of all parameters, once that is known.
    """
    where = {"offload_param": {"device": "cpu", "pin_memory": torch.cuda.is_available()}} if offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": param_dtype == "bf16"},
        "zero_optimization": {"stage": 3, **persistence(elements), **where},
        "steps_per_print": None,
    }


def persistence(elements: int) -> dict[str, int]:
    """Which parameters of a model of `elements` stay whole on every rank: those too small to be worth gathering.

    DeepSpeed's default for all models is 100,000 elements, which of a small model would be most parameters.
    """
    return {"stage3_param_persistence_threshold": min(elements // 100, 100_000)}


class _Told:
    """What transformers asks for before it builds a model; its own class for it needs accelerate."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def born_sharded(world: World, config: dict[str, Any]) -> Iterator[None]:
    """Within it `from_pretrained` cuts every parameter as it is made. Collective.

    Rank 0 reads the weights, one module at a time, and each rank keeps its part. `config`: of `zero3_config`.
    """
    import_deepspeed(world.device)
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    told = _Told(config)
    set_hf_deepspeed_config(told)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


def restore_buffers(model: Any, twin: nn.Module) -> None:
    """Give buffers the precision that `twin`, the same model built without ZeRO-3, has.

    ZeRO-3 makes every tensor in the parameters' precision: rotary frequencies in bf16 would be off by whole turns at
    a thousand tokens.
    """
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        wrong = [
            name
            for name, buffer in other.named_buffers(recurse=False)
            if buffer.is_floating_point() and getattr(module, name).dtype != buffer.dtype
        ]
        for name in wrong:
            setattr(module, name, torch.empty_like(getattr(module, name), dtype=getattr(other, name).dtype))
        if wrong:
            model._init_weights(module)

"""Layers of transformers made faster: compiled by torch (ds.compile), or with Liger's kernels (ds.use_liger_kernel)."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.trainer._transformers import layers_of


def compile_layers(model: Any) -> None:
    """Compile each layer of `model`, one of transformers, when it is first called; layers share what is compiled."""
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def take_liger_kernels(model: Any) -> None:
    """Give `model` Liger's norms, rotations and gated products; its losses and logits stay ours.

    Raises ConfigError without a GPU or the package, and for a model that Liger does not know.
    """
    asked = "ds.use_liger_kernel = true"
    if not torch.cuda.is_available():
        raise ConfigError(f"{asked} needs GPUs, as its kernels are Triton's: leave the key out")
    try:
        liger: Any = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ConfigError(f"{asked} needs the package on all nodes: pip install liger-kernel ({error})") from None
    kind, start = model.config.model_type, "apply_liger_kernel_to_"
    apply = getattr(liger, f"{start}{kind}", None)
    if apply is None:
        known = ", ".join(sorted(name.removeprefix(start) for name in dir(liger) if name.startswith(start)))
        raise ConfigError(f"{asked}: Liger knows no model of type {kind}: leave the key out. Known: {known}")
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)

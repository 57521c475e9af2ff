"""How layers of transformers compute: compiled, by kernels of Liger, and what they keep for the backward pass."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.trainer._transformers import layers_of

_KEPT = (
    *("mm", "addmm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
"""Operators of torch that take most of a layer's time: matrix products and attention."""
_VARLEN = "torch_attn::_varlen_attn"
"""torch's attention over packed rows, an operator that is there once `torch.nn.attention.varlen` was imported."""


def checkpoint_layers(model: Any, how: str) -> None:
    """Have the layers of `model`, one of transformers, keep their inputs alone (full), or more; off: keep all.

    selective: the results of matrix products and attention are kept, too, so the backward pass computes norms,
    rotations and activations again. Source: Korthikanti et al., Reducing Activation Recomputation (2022), the reverse
    of its choice: with fused attention it is cheap things that take memory.
    """
    if how == "off":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


_SAVED = {getattr(torch.ops.aten, name).default for name in _KEPT}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in _SAVED or operator.name().startswith(_VARLEN)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


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

"""Activation checkpointing: what the backward pass finds in memory, and what it computes again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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

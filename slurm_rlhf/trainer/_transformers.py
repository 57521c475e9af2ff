"""The private parts of transformers that this package uses, written for transformers 5.19.0.

masking_utils.py find_packed_sequence_indices(position_ids)
masking_utils.py sdpa_mask(*, batch_size, q_length, kv_length, attention_mask, allow_is_causal_skip)
integrations/deepspeed.py set_hf_deepspeed_config(hf_deepspeed_config_obj)
integrations/deepspeed.py unset_hf_deepspeed_config()
integrations/deepspeed.py _hf_deepspeed_config_weak_ref
modeling_layers.py GradientCheckpointingLayer
modeling_utils.py PreTrainedModel._init_weights(self, module)
modeling_rope_utils.py ROPE_INIT_FUNCTIONS
modeling_rope_utils.py _compute_longrope_parameters(config, device, *, seq_len, layer_type)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def import_modeling() -> None:
    """Import what models are loaded with."""
    import transformers.modeling_utils  # noqa: F401


@contextmanager
def packed_rows_are_known() -> Iterator[None]:
    """Keep transformers, inside the block, from looking for sequences that are packed into a row.

    Without an attention mask it reads the position ids from the device, once or twice in each forward pass: it waits
    for all work that is queued there, and builds a mask over the whole row.
    """
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _none_packed
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _none_packed(position_ids: Tensor) -> None:
    """Answer as `find_packed_sequence_indices` does for rows without packed sequences."""


def boolean_mask(**asked: Any) -> Tensor | None:
    """Build the mask of a batch, bool [B, 1, L, L'], from what transformers gives the functions that build masks."""
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(**asked | {"allow_is_causal_skip": False})
    return mask


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List the layers of a model that can be checkpointed."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


class _DeepSpeedConfig:
    """Stands for the DeepSpeed config that transformers reads before it builds a model; its own needs accelerate."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def shard_new_models(config: dict[str, Any]) -> Iterator[None]:
    """Have `from_pretrained` shard, inside the block, every parameter that it makes; `config`: DeepSpeed's."""
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    kept_alive = _DeepSpeedConfig(config)  # transformers keeps a weak reference
    set_hf_deepspeed_config(kept_alive)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


def restore_buffers(model: Any, kind: Any) -> None:
    """Give the buffers of a sharded model the precision that they have in one made without ZeRO-3.

    ZeRO-3 makes every tensor in the precision of the parameters: rotary frequencies in bf16 would be wrong by whole
    turns at a thousand tokens. `kind`: the Auto class that made `model`.
    """
    twin = _without_memory(kind, model.config)
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


def _without_memory(kind: Any, config: Any) -> nn.Module:
    """Build the model on the meta device, as if ZeRO-3 were off."""
    from transformers.integrations import deepspeed as integration

    reference = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        with torch.device("meta"):
            model: nn.Module = kind.from_config(config, dtype=config.dtype)
            return model
    finally:
        integration._hf_deepspeed_config_weak_ref = reference


def longrope_frequencies(
    config: Any, device: torch.device, length: int, layer_type: str | None
) -> tuple[Tensor, float]:
    """Return (inverse frequencies, factor of cos and sin) of a longrope embedding for texts of `length` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # This is _compute_longrope_parameters.
    frequencies, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=length, layer_type=layer_type)
    return frequencies, scaling

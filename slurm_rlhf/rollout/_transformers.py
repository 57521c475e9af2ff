"""The private parts of transformers that the rollout room uses, written for transformers 5.19.0.

conversion_mapping.py get_model_conversion_mapping(model, *, add_legacy)
core_model_loading.py revert_weight_conversion(model, state_dict)
generation/utils.py GenerationMixin._supports_default_dynamic_cache(cls)
cache_utils.py self.layers
cache_utils.py DynamicLayer.batch_select_indices(self, indices)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def as_saved(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Rename and split `weights`, named as in `model.named_parameters()`, as `save_pretrained` would write them.

    transformers keeps the experts of a layer in one parameter (`mlp.experts.gate_up_proj` [E, 2 I, H]) and saves them
    one by one (`mlp.experts.3.up_proj.weight` [I, H]). Given the former, most of vLLM's loaders keep the old experts
    without a word. The results are views; `model` may be a `skeleton`.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(model, add_legacy=False):
        yield from weights
        return
    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def shared_prompts(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
    """Compute keys and values of prompts, int64 [B, P] padded left, each of several equal ones once.

    Returns the cache that `generate` goes on from with all B rows: all tokens of each but the last. None where no two
    are equal, and for a model that keeps anything else of a text, or of a window of it only.
    """
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    different, place = torch.cat([input_ids, attention_mask], dim=1).unique(dim=0, return_inverse=True)
    rows, width = input_ids.shape
    if len(different) == rows or width < 2 or not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    ids, mask = different[:, : width - 1], different[:, width:-1]
    inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    model(**inputs)
    cache.batch_select_indices(place)
    return cache

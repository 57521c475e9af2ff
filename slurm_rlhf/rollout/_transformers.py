"""The private parts of transformers that the rollout room uses, written for transformers 5.19.0.

conversion_mapping.py get_model_conversion_mapping(model, *, add_legacy)
core_model_loading.py revert_weight_conversion(model, state_dict)
"""

from __future__ import annotations

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

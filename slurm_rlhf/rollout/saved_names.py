"""A trainer's parameters in the names and pieces of a saved model, which vLLM's loaders expect.

transformers keeps the experts of a layer in one parameter (`mlp.experts.gate_up_proj` [E, 2 I, H]) and saves them one
by one (`mlp.experts.3.up_proj.weight` [I, H]). Given the former, most of vLLM's loaders keep the old experts without a
word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def skeleton(path: str) -> Any:
    """The causal language model in directory `path`, without memory for its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def as_saved(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights`, named as in `model.named_parameters()`, as `model.save_pretrained` would write them; views.

    One parameter at a time is cut. `model` may be a skeleton.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(model, add_legacy=False):
        yield from weights
        return
    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor}).items()

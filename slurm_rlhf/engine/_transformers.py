"""The private parts of transformers that this package uses, written for transformers 5.19.0.

conversion_mapping.py get_model_conversion_mapping(model, *, add_legacy)
core_model_loading.py revert_weight_conversion(model, state_dict)
generation/utils.py GenerationMixin._supports_default_dynamic_cache(cls)
generation/utils.py GenerationMixin._prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration)
generation/utils.py GenerationMixin._update_model_kwargs_for_generation(self, outputs, model_kwargs)
generation/utils.py GenerationMixin._has_unfinished_sequences(self, this_peer_finished, synced_gpus, device)
generation/utils.py GenerationMixin._optimize_model_for_decode(self)
cache_utils.py self.layers
cache_utils.py DynamicLayer.batch_select_indices(self, indices)
cache_utils.py DynamicSlidingWindowLayer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def skeleton(path: str) -> Any:
    """Build the causal language model in directory `path` without memory for its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Map the names of a transformers model's parameters to their shapes, in its order.

    Tied weights appear once, under the embedding's name: the names that a trainer's `named_parameters()` yields.
    """
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


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


def selects_rows(model: Any) -> bool:
    """Tell whether the cache of `model` holds keys and values only, from which single rows can be taken."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def prefilled(
    model: Any, inputs: Mapping[str, Tensor], most: int, pad: int, place: Tensor | None
) -> tuple[Texts, Tensor]:
    """Have `generate` prepare the model's inputs and cache, and run the prefill of the texts in `inputs`.

    Returns the texts, which may grow by `most` tokens, and the logits of their next tokens, fp32 [B, V]. `place` int64
    [B]: index of the text that each row continues; None: row i continues text i.
    """
    from transformers import GenerationConfig

    def begin(model: Any, input_ids: Tensor, generation_config: Any, **given: Any) -> tuple[Texts, Tensor]:
        kwargs = {name: value for name, value in given.items() if name not in ("logits_processor", "stopping_criteria")}
        texts = Texts(model, input_ids, kwargs)
        logits = texts.prefill(generation_config)
        if place is not None:
            texts.take(place)
            logits = logits[place]
        return texts, logits

    settings = GenerationConfig(max_new_tokens=most, do_sample=False, use_cache=True, pad_token_id=pad)
    found: tuple[Texts, Tensor] = model.generate(**inputs, generation_config=settings, custom_generate=begin)
    return found


def decoding_setup(model: Any) -> AbstractContextManager[None]:
    """Prepare `model`, inside the block, for passes of one token a text."""
    setup: AbstractContextManager[None] = model._optimize_model_for_decode()
    return setup


def go_on(model: Any, here: bool, together: bool, device: Any) -> bool:
    """Tell whether another pass is needed. `here`: this rank has unfinished texts; `together`: asks all ranks."""
    return bool(model._has_unfinished_sequences(not here, together, device=device))


@dataclass(slots=True)
class Texts:
    """Holds texts that a model continues: their tokens, and the arguments of its next forward pass."""

    model: Any
    ids: Tensor  # int64 [B, L]
    kwargs: dict[str, Any]

    def prefill(self, generation_config: Any) -> Tensor:
        """Compute the prompts; return the logits after them, fp32 [B, V]."""
        return self._after(self.model._prefill(self.ids, generation_config, self.kwargs))

    def step(self) -> Tensor:
        """Compute the last tokens; return the logits after them, fp32 [B, V]."""
        inputs = self.model.prepare_inputs_for_generation(self.ids, next_sequence_length=1, **self.kwargs)
        return self._after(self.model(**inputs, return_dict=True))

    def append(self, tokens: Tensor, rows: list[int]) -> None:
        """Append `tokens` [B], one to each text; then keep the texts `rows` only. Empty: keep all."""
        import torch

        self.ids = torch.cat([self.ids, tokens[:, None]], dim=-1)
        if 0 < len(rows) < len(tokens):
            self.take(torch.tensor(rows, device=self.ids.device))

    def take(self, rows: Tensor) -> None:
        """Keep the texts `rows`, in this order; a row that is listed twice is kept twice."""
        count = len(self.ids)
        self.ids = self.ids[rows]
        for name, value in self.kwargs.items():
            if hasattr(value, "batch_select_indices"):
                value.batch_select_indices(rows)
            elif hasattr(value, "shape") and value.shape[:1] == (count,):
                self.kwargs[name] = value[rows]

    def _after(self, outputs: Any) -> Tensor:
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs)
        logits: Tensor = outputs.logits[:, -1].float()
        return logits

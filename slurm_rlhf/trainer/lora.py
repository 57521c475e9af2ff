"""Low-rank adapters of linear layers: y = W x + b + (alpha / r) B A x, where W and b stay as they are.

Source: Hu et al., LoRA (2021), arXiv 2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.algorithms.lora import A, B, is_adapter, last_part, target_layers


class LoraLinear(nn.Linear):
    """Adds an adapter to a linear layer, whose own parameters keep their names."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float  # alpha / r; 0 while the layer computes as the base model does

    def forward(self, input: Tensor) -> Tensor:
        """Return y [..., out] of `input` [..., in]."""
        # Computed even if the scaling is 0: ZeRO-3 prefetches parameters in the order of the pass before.
        return super().forward(input) + self.lora_B(self.lora_A(input)) * self.scaling


def attach(
    model: Any, rank: int, alpha: float, targets: Sequence[str], seed: int = 0, dtype: torch.dtype | None = None
) -> None:
    """Freeze `model`, a model of transformers, and add trained adapters to its layers (`target_layers`).

    A is drawn from U(-1 / sqrt(in), 1 / sqrt(in)), as PEFT does, from `seed`; B is 0, so the model computes as before.
    `dtype`: of the adapters; None: each layer's. Raises ModelError as `target_layers` does.
    """
    layers = target_layers(model, targets)
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for layer in layers.values():
        _adapt(layer, rank, alpha / rank, generator, dtype or layer.weight.dtype)


def _adapt(layer: Any, rank: int, scaling: float, generator: torch.Generator, dtype: torch.dtype) -> None:
    where: dict[str, Any] = {"device": layer.weight.device, "dtype": dtype}
    layer.__class__ = LoraLinear
    layer.scaling = scaling
    layer.lora_A = nn.Linear(layer.in_features, rank, bias=False, **where)
    layer.lora_B = nn.Linear(rank, layer.out_features, bias=False, **where)
    bound = 1.0 / math.sqrt(layer.in_features)
    with torch.no_grad():
        drawn = torch.rand(rank, layer.in_features, generator=generator) * (2 * bound) - bound
        layer.lora_A.weight.copy_(drawn)
        layer.lora_B.weight.zero_()


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers of `model` that have adapters, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, LoraLinear)}


@contextmanager
def base_model(model: nn.Module) -> Iterator[None]:
    """Have `model` compute, inside the block, as if it had no adapters."""
    scalings = {layer: layer.scaling for layer in adapted_layers(model).values()}
    for layer in scalings:
        layer.scaling = 0.0
    try:
        yield
    finally:
        for layer, scaling in scalings.items():
            layer.scaling = scaling


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Return the arguments with which `attach` gave `model` its adapters, without the seed; empty if it has none."""
    layers = adapted_layers(model)
    if not layers:
        return {}
    one = next(iter(layers.values()))
    rank = one.lora_A.out_features
    return {"rank": rank, "alpha": one.scaling * rank, "targets": sorted({*map(last_part, layers)})}


def merge(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the adapters out of `state`, the whole parameters of `model` by name, and add them to their layers in fp32.

    Returns the adapters as they were: W becomes W + (alpha / r) B A, rounded once to W's precision.
    """
    taken = {name: state.pop(name) for name in [*state] if is_adapter(name)}
    for name, layer in adapted_layers(model).items():
        weight = state[f"{name}.weight"]
        update = taken[f"{name}.{B}"].float() @ taken[f"{name}.{A}"].float()
        state[f"{name}.weight"] = (weight.float() + layer.scaling * update).to(weight.dtype)
    return taken

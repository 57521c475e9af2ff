"""Low-rank adapters: which layers of a model get them, and their names, which are PEFT's.

A layer `q_proj` gets `q_proj.lora_A.weight` [r, in] and `q_proj.lora_B.weight` [out, r].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slurm_rlhf.errors import ModelError, shortened

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer except the head over the vocabulary."""
A, B = "lora_A.weight", "lora_B.weight"


def is_adapter(name: str) -> bool:
    """Tell whether the parameter of this name belongs to an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def last_part(name: str) -> str:
    """Return the name of a layer in its parent: q_proj of model.layers.0.self_attn.q_proj."""
    return name.rpartition(".")[2]


def target_layers(model: Any, targets: Sequence[str]) -> dict[str, Any]:
    """Return the linear layers of a transformers model that `targets` name by their last parts, in the model's order.

    Raises ModelError for a target without a layer, and for models with experts.
    """
    kind, head = type(model).__name__, model.get_output_embeddings()
    parts = dict(model.named_modules())
    layers = {name: part for name, part in parts.items() if type(part).__name__ == "Linear" and part is not head}
    check_targets(kind, {*map(last_part, parts)}, {*map(last_part, layers)}, targets)
    return {name: part for name, part in layers.items() if {last_part(name), ALL_LINEAR} & {*targets}}


def check_targets(model: str, parts: Collection[str], known: Collection[str], targets: Sequence[str]) -> None:
    """Check that `known`, the last parts of the names of linear layers, has all targets, and that there are no experts.

    `parts`: the last parts of the names of all modules. Raises ModelError.
    """
    if "experts" in parts:
        raise ModelError(f"lora.rank: {model} has experts, for which there are no adapters here: set it to 0")
    if not known:
        raise ModelError(
            f"lora.rank: {model} has no layers of the class Linear, which alone get adapters here: set it to 0, or "
            "use another model"
        )
    if unknown := [name or "(empty)" for name in targets if name != ALL_LINEAR and name not in known]:
        raise ModelError(
            f"lora.target_modules: {model} has no linear layers named {shortened(unknown)}; it has "
            f"{', '.join(sorted(known))}"
        )


def adapter_shapes(layers: Mapping[str, Any], rank: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the adapters of `layers`, in their order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in layers.items():
        shapes |= {f"{name}.{A}": (rank, layer.in_features), f"{name}.{B}": (layer.out_features, rank)}
    return shapes

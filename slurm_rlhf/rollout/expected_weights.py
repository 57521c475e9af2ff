"""The parameters that a weight update must have: their shapes, and checks of what arrives and what was loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from slurm_rlhf.errors import SyncError, shortened

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def skeleton(path: str) -> Any:
    """Build the causal language model in directory `path` without memory for its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def parameter_shapes(model: Any) -> Shapes:
    """Map the names of a transformers model's parameters to their shapes, in its order.

    Tied weights appear once, under the embedding's name: the names that a trainer's `named_parameters()` yields.
    """
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_loaded(model: Any, loaded: set[str] | None) -> None:
    """Raise SyncError unless every parameter of vLLM's `model` is in `loaded`, the names that its loader reports.

    Its loaders ignore names that they do not know. Tied parameters have one name. None: the loader reports nothing.
    """
    missing = [name for name, _ in model.named_parameters() if name not in loaded] if loaded is not None else []
    if missing:
        raise SyncError(
            f"vLLM's {type(model).__name__} was sent all parameters of the policy and has not loaded {len(missing)} "
            f"of its own, which keep the old policy's: {shortened(missing)}. This architecture cannot be trained yet."
        )


def checked(weights: Iterable[tuple[str, Tensor]], shapes: Shapes, version: int) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, checked: vLLM's loaders skip, repeat or broadcast without an error.

    Raises SyncError at the first parameter that is unknown, doubled or of another shape, and at the end for those that
    are missing.
    """
    missing = dict(shapes)
    for name, tensor in weights:
        if name not in shapes:
            raise SyncError(
                f"policy version {version}: the engine has no parameter {name!r} (shape {tuple(tensor.shape)}). Actor "
                f"and engines must start from the same model directory; known: {shortened(shapes)}"
            )
        if name not in missing:
            raise SyncError(f"policy version {version}: parameter {name!r} was sent twice")
        expected = missing.pop(name)
        if tuple(tensor.shape) != expected:
            raise SyncError(
                f"policy version {version}: parameter {name!r} has shape {tuple(tensor.shape)}, the engine's has "
                f"{expected}. Send full (unsharded) parameters of the same model"
            )
        yield name, tensor
    if missing:
        raise SyncError(
            f"policy version {version}: {len(missing)} of {len(shapes)} parameters were not sent: {shortened(missing)}"
        )

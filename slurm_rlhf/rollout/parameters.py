"""Which parameters a weight update must bring, checked while they stream by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from slurm_rlhf.errors import SyncError
from slurm_rlhf.listing import shortened

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(model: Any) -> Shapes:
    """name -> shape of a transformers model, in its order.

    Tied weights appear once, under the embedding's name: the names that a trainer's `named_parameters()` yields.
    """
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_loaded(model: Any, loaded: set[str] | None) -> None:
    """Raises SyncError unless vLLM's loader says of every parameter of its `model` that it got it.

    Its loaders pass over names that they do not know. Tied parameters have one name; a loader that keeps no account
    answers None.
    """
    missing = [name for name, _ in model.named_parameters() if name not in loaded] if loaded is not None else []
    if missing:
        raise SyncError(
            f"vLLM's {type(model).__name__} was sent all parameters of the policy and has not loaded {len(missing)} "
            f"of its own, which stay the old policy's: {shortened(missing)}. This architecture cannot be trained "
            "here yet."
        )


def checked(weights: Iterable[tuple[str, Tensor]], shapes: Shapes, version: int) -> Iterator[tuple[str, Tensor]]:
    """`weights`, with an error in place of silence where vLLM's loaders skip, repeat or broadcast.

    Raises SyncError naming the parameter at the first that is unknown, doubled or of another shape, and at the end for
    those that never came.
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

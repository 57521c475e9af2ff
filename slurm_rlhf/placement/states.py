"""Bytes of a trained model's parameters, gradients and optimizer states on one rank, as DeepSpeed holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BUCKET = 200_000_000  # elements of a reduce bucket, at most: `training/zero.py`
ALL_REDUCE = 500_000_000  # elements that DeepSpeed reduces at once without ZeRO
LIVE = 1_000_000_000  # elements that ZeRO-3 gathers ahead, at most: DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank."""

    parameters: int
    gradients: int  # as they stand before an optimizer step
    optimizer: int  # AdamW's two moments in fp32, and fp32 masters where there are any
    resting_gradients: int  # of `gradients`: what stays between two optimizer steps
    parked: int  # of all: what ds.enable_sleep moves to host memory, or gives back between two steps


def states(elements: int, ranks: int, stage: int, bf16: bool, small: int = 0) -> States:
    """Of a model of `elements` parameters under ZeRO `stage` over `ranks`.

    `small`: elements of the tensors that ZeRO-3 does not cut. At stage 0 parameters are fp32 and computed with under
    autocast. Stage 1 keeps whole gradients: in bf16 DeepSpeed holds them as they come and their fp32 sum.
    Source: Rajbhandari et al., ZeRO (2020), section 3, with DeepSpeed's choices of precision.
    """
    width = 2 if bf16 and stage else 4
    part = -(-elements // ranks)
    if stage == 0:
        return States(4 * elements, 4 * elements, 8 * elements, 0, 0)
    if stage == 3:
        return States(width * (part + small), 4 * part, 12 * part, 4 * part, 16 * part)
    gradients = 4 * part
    resting = 0
    if stage == 1:
        gradients = 6 * elements if bf16 else 4 * elements
        resting = 4 * elements if bf16 else 0
    return States(width * elements, gradients, 12 * part, resting, 12 * part if stage == 2 else 0)


def reduce_buckets(elements: int, stage: int, grad_comm_bf16: bool) -> int:
    """Bytes of the buckets in which ranks add up gradients: two from ZeRO-1 on, one sent while the other fills."""
    width = 2 if grad_comm_bf16 else 4
    if stage == 0:
        return width * min(elements, ALL_REDUCE)
    return width * 2 * min(elements, BUCKET)


def loose_gradient(elements: int, largest: int, bf16: bool, grad_comm_bf16: bool) -> int:
    """Bytes of the largest tensor's gradient, which comes in one piece, and is sent as one if no bucket holds it."""
    alone = (2 if grad_comm_bf16 else 4) * largest if largest > min(elements, BUCKET) else 0
    return (2 if bf16 else 4) * largest + alone


def gathered(elements: int, largest: int, bf16: bool) -> int:
    """Bytes of layers that ZeRO-3 holds whole for a moment."""
    return (2 if bf16 else 4) * min(elements, max(LIVE, largest))


def persistent(sizes: Iterable[tuple[int, int]], elements: int) -> int:
    """Elements of the tensors, (elements, count) each, that ZeRO-3 leaves whole: `training.sharded.persistence`."""
    threshold = min(elements // 100, 100_000)
    return sum(size * count for size, count in sizes if size <= threshold)

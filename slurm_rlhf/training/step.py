"""One optimizer step over the micro-batches of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.records import Experience
from slurm_rlhf.training.engine import TrainEngine


def optimizer_step(
    engine: TrainEngine,
    exp: Experience,
    micro: list[list[int]],
    loss_of: Callable[[Experience], tuple[Tensor, Metrics]],
) -> dict[str, float]:
    """Accumulate `loss_of` each micro-batch (rows of `exp`), then step. Collective, with as many on every rank.

    Answers this rank's sums of the metrics, and `lr` and `grad_norm` of the whole step. Raises RunError.
    """
    sums: Metrics = {}
    for number, rows in enumerate(micro, start=1):
        loss, metrics = loss_of(exp.select(rows))
        engine.accumulate(loss, is_last=number == len(micro))
        sums = {name: sums[name] + value if name in sums else value for name, value in metrics.items()}
    stats = engine.step()
    return _numbers(sums) | {"lr": stats.lr, "grad_norm": stats.grad_norm}


def _numbers(sums: Metrics) -> dict[str, float]:
    """All of them in one copy from the device."""
    return dict(zip(sums, torch.stack([value.double() for value in sums.values()]).tolist(), strict=True))

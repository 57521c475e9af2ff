"""Forward passes over an experience without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.collate import TokenBatch, collate


def per_action(
    exp: Experience, micro: list[list[int]], device: torch.device, answer: Callable[[TokenBatch], Tensor]
) -> F32:
    """`answer` ([A of the micro-batch]) for every micro-batch (rows of `exp`), put together in the order of `exp`, [A].

    Every row must be in one micro-batch. Under ZeRO-3 every rank needs as many micro-batches: each is a collective.
    """
    offsets = exp.action_offsets
    result = np.full(int(offsets[-1]), np.nan, dtype=np.float32)
    with torch.no_grad():
        for rows in micro:
            part = exp.select(rows)
            values = answer(collate(part, device)).cpu().numpy()
            mine = part.action_offsets
            for place, row in enumerate(rows):
                result[offsets[row] : offsets[row + 1]] = values[mine[place] : mine[place + 1]]
    return result


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """After it the random state and the mode of every submodule, train or eval, are what they were before."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for part, mode in modes:
            part.training = mode

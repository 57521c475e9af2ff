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
        answers = [answer(collate(exp.select(rows), device)) for rows in micro]
        # Once, behind the last: whoever waits for each micro-batch gives the next one to an idle device.
        values = torch.cat(answers).cpu().numpy() if answers else result[:0]
    start = 0
    for row in (row for rows in micro for row in rows):
        end = start + int(exp.response_lens[row])
        result[offsets[row] : offsets[row + 1]] = values[start:end]
        start = end
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

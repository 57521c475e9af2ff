"""Trainers on accelerators that others use, too (train.colocate_all)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.training.distributed import release_cache

Calls = dict[str, Callable[..., Any]]


def taking_turns(config: Config, calls: Calls) -> Calls:
    """`calls`, each of which leaves no memory behind that it does not need any more, where it shares its accelerator.

    PyTorch keeps freed memory for this process, and whoever's turn comes next would find the device full.
    """
    if not config.train.colocate_all:
        return calls
    return {name: _releasing(call) for name, call in calls.items()}


def _releasing(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def releasing(**arguments: Any) -> Any:
        try:
            return call(**arguments)
        finally:
            release_cache()

    return releasing

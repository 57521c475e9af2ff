"""Advantage estimators by the name that `algo.advantage.estimator` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.algorithms.advantages import gae, token_rewards
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.records import F32, Bool


@dataclass(slots=True)
class AdvantageInputs:
    """All that an estimator may look at: one batch in (prompt, sample) order, packed."""

    rewards: NDArray[Any]  # [N]
    kl: F32 | None  # [A], None without a reference
    values: F32  # [A]
    action_mask: Bool  # [A]
    offsets: NDArray[np.int64]  # [N + 1]
    kl_coef: float
    clip_range: Sequence[float]
    gamma: float
    lambd: float


Estimator = Callable[[AdvantageInputs], tuple[F32, F32]]
"""Inputs -> (advantages [A], returns [A]), not whitened, zero at masked positions."""

_ESTIMATORS: dict[str, Estimator] = {}


def register(name: str) -> Callable[[Estimator], Estimator]:
    """Decorator: make a function known as `algo.advantage.estimator = name`."""

    def add(function: Estimator) -> Estimator:
        if name in _ESTIMATORS:
            raise ValueError(f"advantage estimator {name!r} is registered twice")
        _ESTIMATORS[name] = function
        return function

    return add


def estimator_names() -> list[str]:
    """The valid names, sorted."""
    return sorted(_ESTIMATORS)


def advantage_estimator(name: str) -> Estimator:
    """The estimator of that name. Raises ConfigError that names the valid ones."""
    if name not in _ESTIMATORS:
        raise ConfigError(f"algo.advantage.estimator = {name!r} is unknown; valid: {', '.join(estimator_names())}")
    return _ESTIMATORS[name]


@register("gae")
def gae_estimator(inputs: AdvantageInputs) -> tuple[F32, F32]:
    """PPO: the KL penalty and the clipped reward per token, then `advantages.gae`."""
    rewards = token_rewards(
        inputs.kl, inputs.kl_coef, inputs.rewards, inputs.action_mask, inputs.offsets, inputs.clip_range
    )
    return gae(rewards, inputs.values, inputs.action_mask, inputs.offsets, inputs.gamma, inputs.lambd)

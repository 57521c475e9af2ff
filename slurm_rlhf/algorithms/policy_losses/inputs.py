"""What a policy loss is given, what it answers, and the guard around a loss of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.user_files import file_of, line_of, text_of

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Hold everything that a policy loss may look at: one micro-batch of n responses, packed."""

    logprobs: Tensor  # [A], with gradient
    old_logprobs: Tensor  # [A]
    advantages: Tensor  # [A]
    action_mask: Tensor  # bool [A]
    response_lens: list[int]  # [n], tokens of each response; their sum is A
    weights: Tensor | None  # [A], of the loss of each token, 0 and fractions included; None: 1 for every action
    denominator: float
    clip_low: float
    clip_high: float
    dual_clip: float = 0.0  # 0: off
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # for advantages above 0, and for the others


PolicyLoss = Callable[[PolicyInputs], tuple["Tensor", Metrics]]
"""Inputs -> (loss, a scalar with gradient; detached sums over the actions by name)."""


def checked_loss(name: str, function: PolicyLoss) -> PolicyLoss:
    """Guard the policy loss of algorithm `name`: what is wrong with it is told with its file, line and what to do.

    The guarded loss raises ConfigError when `function` raises, or answers anything but (scalar with gradient, metrics).
    """
    source, what = file_of(function), f"the policy loss of algorithm {name!r}"

    def call(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
        try:
            loss, metrics = function(inputs)
            scalar = loss.dim() == 0 and loss.requires_grad
            sums = {key: value.detach() for key, value in metrics.items() if value.dim() == 0}
        except Exception as error:
            raise ConfigError(
                f"{line_of(source, error)}: {what} raised {text_of(error)}. It answers the loss, and a dict of sums "
                "over the actions, all of them tensors"
            ) from error
        if not scalar or len(sums) < len(metrics):
            raise ConfigError(
                f"{source}: {what} must answer a scalar that has a gradient, and scalars as metrics; got a loss of "
                f"shape {tuple(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}, metrics "
                f"{sorted(metrics)}"
            )
        return loss, sums

    return call

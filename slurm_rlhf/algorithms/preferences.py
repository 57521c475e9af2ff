"""Compute the losses of preference pairs: DPO and its kin, on summed log-probs of whole answers.

Row 2 i is the chosen answer of pair i, row 2 i + 1 the rejected one. All sums are over the answer's tokens, the
end-of-sequence token included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # losses call methods of tensors only, so that this room needs no torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Hold log-probs of N pairs, fp32 [N] each, and what the losses need besides."""

    chosen: Tensor  # sum of the policy's log-probs, with gradient
    rejected: Tensor
    ref_chosen: Tensor  # sum of the reference's; 0 where the loss has none
    ref_rejected: Tensor
    chosen_tokens: Tensor  # tokens of the answer, a float
    rejected_tokens: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """Return how much more the policy prefers the chosen answer than the reference does, [N]."""
        return (self.chosen - self.ref_chosen) - (self.rejected - self.ref_rejected)


Loss = Callable[[Pairs, float, float, float], "Tensor"]
"""(pairs, beta, label_smoothing, gamma) -> loss of each pair, [N]."""


def _softplus(x: Tensor) -> Tensor:
    """Compute -log(sigmoid(-x)) = log(1 + exp(x)) without overflow."""
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


def _smoothed(logit: Tensor, smoothing: float) -> Tensor:
    return (1 - smoothing) * _softplus(-logit) + smoothing * _softplus(logit)


def _dpo(pairs: Pairs, beta: float, smoothing: float, gamma: float) -> Tensor:
    """Compute -log sigmoid(beta h); with smoothing the labels are wrong with that probability (conservative DPO).

    h: `log_ratio`. Sources: Rafailov et al., Direct Preference Optimization (2023), eq. 7; Mitchell, A note on DPO with
    noisy preferences (2023), eq. 3.
    """
    return _smoothed(beta * pairs.log_ratio, smoothing)


def _ipo(pairs: Pairs, beta: float, smoothing: float, gamma: float) -> Tensor:
    """Compute (h - 1 / (2 beta))^2, with the log-probs of a token in the mean in h.

    Sources: Azar et al., A General Theoretical Paradigm (2023), eq. 17; the mean over tokens as in TRL.
    """
    chosen = (pairs.chosen - pairs.ref_chosen) / pairs.chosen_tokens
    rejected = (pairs.rejected - pairs.ref_rejected) / pairs.rejected_tokens
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def _simpo(pairs: Pairs, beta: float, smoothing: float, gamma: float) -> Tensor:
    """Compute -log sigmoid(beta (mean log-prob of chosen - of rejected) - gamma), without a reference.

    Source: Meng et al., SimPO (2024), eq. 6.
    """
    margin = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return _smoothed(beta * margin - gamma, smoothing)


def _orpo(pairs: Pairs, beta: float, smoothing: float, gamma: float) -> Tensor:
    """Compute the cross-entropy of the chosen answer, and beta times -log sigmoid of the log odds ratio.

    odds(p) = p / (1 - p) of the mean log-prob of a token. Source: Hong et al., ORPO (2024), eqs. 6 and 7.
    """
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    odds = (chosen - rejected) - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())
    return -chosen + beta * _softplus(-odds)


LOSSES: dict[str, Loss] = {"dpo": _dpo, "ipo": _ipo, "simpo": _simpo, "orpo": _orpo}
"""`dpo.loss_type` -> its loss."""

WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses that compare with no reference."""

"""Compute the losses of preferences: DPO and its kin on summed log-probs of answers, Bradley-Terry on scores.

Row 2 i is the chosen answer of pair i, row 2 i + 1 the rejected one. All sums are over the answer's tokens, the
end-of-sequence token included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slurm_rlhf.records import F32

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
    """Compute -log(sigmoid(-x)) = log(1 + exp(x)) without overflow; the gradient at 0, where DPO begins, is right."""
    return x.logaddexp(x.new_zeros(()))


def _smoothed(logit: Tensor, smoothing: float) -> Tensor:
    return (1 - smoothing) * _softplus(-logit) + smoothing * _softplus(logit)


def _dpo(pairs: Pairs, beta: float, smoothing: float, gamma: float) -> Tensor:
    """Compute -log sigmoid(beta h); with smoothing the labels are wrong with that probability (conservative DPO).

    h: `log_ratio`. Sources: Rafailov et al., Direct Preference Optimization (2023), eq. 7; Mitchell, A note on DPO with
    noisy preferences (2023), eq. 3.
    """
    return _smoothed(beta * pairs.log_ratio, smoothing)


def _ipo(pairs: Pairs, beta: float, smoothing: float, gamma: float) -> Tensor:
    """Compute (h - 1 / (2 beta))^2, where h has the mean log-prob of an answer's tokens in place of the sum.

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
"""Losses that need no reference model."""


KTO = "kto"
"""The `dpo.loss_type` that takes single answers labelled good or bad, in place of pairs; its loss is `kto`."""


def kto(log_ratio: Tensor, good: Tensor, kl: Tensor, beta: float, weights: tuple[float, float]) -> Tensor:
    """Compute w (1 - sigmoid(beta (h - z))) of a good answer, w (1 - sigmoid(beta (z - h))) of a bad one, [N].

    h: `log_ratio` [N], of the policy to the reference. good [N]: 1 or 0. weights: w of good and of bad answers.
    z: `kl`, a number without gradient, the KL divergence to the reference over the whole optimizer step (`kto_kl`).
    Source: Ethayarajh et al., KTO (2024), arXiv 2402.01306, eq. 8.
    """
    sign = 2 * good - 1
    return (good * weights[0] + (1 - good) * weights[1]) * (beta * sign * (kl - log_ratio)).sigmoid()


def kto_kl(log_ratios: float, examples: int) -> float:
    """Estimate KTO's z: the mean log-ratio of answers to other prompts, at least 0.

    `log_ratios`: their sum over the `examples` of the step. Source: as `kto`, section 4.1; TRL, `kto_trainer.py`.
    """
    return max(0.0, log_ratios / examples)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Compute -log sigmoid(s_chosen - s_rejected - margin) of scores, [N] each.

    Sources: Ouyang et al., Training language models to follow instructions (2022), eq. 1; with margins: Touvron et al.,
    Llama 2 (2023), eq. 2.
    """
    return _softplus(margin - (chosen - rejected))


BINS = 10


def judged(scores: F32) -> dict[str, float]:
    """Measure the scores of held-out pairs, fp32 [2 N]: how often, how far and how surely the chosen answer is ahead.

    accuracy: share of the pairs whose chosen answer has the higher score; a pair with equal scores counts half. margin:
    mean difference. calibration_error: |mean probability - share of right pairs| in each of BINS equal bins of the
    probability sigmoid(|difference|) from 0.5 to 1, averaged over pairs (Guo et al., On Calibration of Modern Neural
    Networks (2017), eq. 3). mean, std: of all scores; a trained reward model is normalised by them.
    """
    difference = scores[::2].astype(np.float64) - scores[1::2]
    sure = 1 / (1 + np.exp(-np.abs(difference)))
    right = (np.sign(difference) + 1) / 2
    bins = np.minimum((2 * BINS * (sure - 0.5)).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, sure - right, BINS)
    return {
        "accuracy": float(right.mean()),
        "margin": float(difference.mean()),
        "calibration_error": float(np.abs(gaps).sum() / len(difference)),
        "mean": float(scores.mean(dtype=np.float64)),
        "std": float(scores.std(dtype=np.float64)),
    }

"""Turn the losses of tokens into one number: a weight for each token, and one denominator for the whole optimizer step.

Both are computed from the whole step, over all micro-batches and data-parallel ranks, so that a step does not depend on
how it is cut: adding the gradients of all parts gives the exact mean over tokens, or over responses, and not a mean of
means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.algorithms.packed import I64, find_actions
from slurm_rlhf.records import F32, Bool

Weights = tuple[float, F32 | None]
"""(denominator, weight of each token [A]; None: 1 for every action)."""


def _token_mean(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Take the mean over all actions of the step. Source: Yu et al., DAPO (2025), arXiv 2503.14476."""
    return float(counts.sum()), None


def _seq_mean_token_mean(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Take the mean over responses of the mean over their actions. Source: Shao et al., DeepSeekMath (2024), eq. 3."""
    return float((counts > 0).sum()), 1.0 / np.maximum(counts, 1)


def _seq_mean_token_sum(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Take the mean over responses of the sum over their actions."""
    return float((counts > 0).sum()), None


def _seq_mean_token_sum_norm(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Divide that by the longest length a response may have. Source: Liu et al., Dr. GRPO (2025), arXiv 2503.20783."""
    return float((counts > 0).sum()) * longest, None


AGGREGATIONS: dict[str, Callable[[I64, int], tuple[float, NDArray[Any] | None]]] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
"""Name -> (actions of each response [N], longest length) -> (denominator, weight of each response [N] or None)."""


def loss_weights(mode: str, action_mask: Bool, offsets: NDArray[Any], longest: int) -> Weights:
    """Find denominator and token weights of an optimizer step; a response without actions counts nowhere.

    action_mask [A], offsets [N + 1] of the whole step over all ranks; longest: rollout.max_new_tokens.
    """
    counts = find_actions(action_mask, offsets).counts
    denominator, weights = AGGREGATIONS[mode](counts, longest)
    if weights is None:
        return denominator, None
    return denominator, np.repeat(weights, np.diff(offsets)).astype(np.float32)


def positive_weights(rewards: F32, action_mask: Bool, offsets: NDArray[Any]) -> F32:
    """Weigh the actions of responses with a positive reward by 1 / their number, [A]; all others by 0.

    rewards [N], action_mask [A], offsets [N + 1] of the whole step over all ranks.
    """
    chosen = np.repeat(np.asarray(rewards) > 0, np.diff(offsets)) & action_mask
    return chosen.astype(np.float32) / np.float32(max(chosen.sum(), 1))

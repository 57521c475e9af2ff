"""Estimate pass@k, the accuracy of a majority vote, and how far a mean may be off, from n responses to each prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds a figure and its confidence interval at `CONFIDENCE`."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate the probability that at least one of k responses to a prompt is correct.

    `correct` of `samples` responses were. 1 - C(n - c, k) / C(n, k): the share of all subsets of k responses that hold
    a correct one, so it has no bias, unlike 1 - (1 - c/n)^k. Source: Chen et al., Evaluating Large Language Models
    Trained on Code (2021), arXiv 2107.03374, section 2.1. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} of {correct} correct in {samples} responses: 1 <= k <= n and 0 <= c <= n is needed")
    wrong = samples - correct
    if wrong < k:
        return 1.0
    # The fraction of the two binomials without their factorials, which would overflow.
    return 1.0 - math.prod(1.0 - k / size for size in range(wrong + 1, samples + 1))


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Score the answer that most of the responses to a prompt give.

    answers, scores: one per response; None abstains. Equal answers may have unlike scores: their mean counts. Where
    several answers have the most votes, the mean of theirs: what drawing one of them scores on average. Where all
    abstain there is no answer: 0. Source: Wang et al., Self-Consistency Improves Chain of Thought Reasoning (2022).
    """
    votes: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(score)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return float(np.mean([np.mean(found) for found in votes.values() if len(found) == most]))


def bootstrap(sums: F64, counts: F64, seed: int, name: str) -> Estimate:
    """Estimate sum(sums) / sum(counts) with the percentile interval of a bootstrap over prompts.

    sums, counts: [P], what each prompt adds to a figure and how many responses (or 1, where the figure is one number
    per prompt). Prompts are drawn and not responses: those to one prompt resemble each other, and drawing them alone
    would call the figure surer than it is. `seed` and `name` of the figure choose the draws, so that the same responses
    have the same interval everywhere. Without prompts: NaN. Source: Efron, Bootstrap Methods (1979).
    """
    if not len(sums):
        return Estimate(math.nan, math.nan, math.nan)
    # Prompts that add the same are one row: a draw of P prompts is then one multinomial draw of few numbers.
    kinds, times = np.unique(np.stack([sums, counts], axis=1), axis=0, return_counts=True)
    drawn = _generator(seed, name).multinomial(len(sums), times / len(sums), size=RESAMPLES) @ kinds
    drawn = drawn[drawn[:, 1] > 0]
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [tail, 1.0 - tail])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))


def wilson(sums: F64, counts: F64) -> Estimate:
    """Estimate a share, sum(sums) / sum(counts), with its score interval, which does not collapse near 0 and 1.

    sums, counts: [P] as in `bootstrap`, with every score (or figure of a prompt) between 0 and 1. The responses to one
    prompt resemble each other: n is as many independent ones as have the variance that is seen, from P to all of them.
    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). Without prompts: NaN.
    Sources: Wilson, JASA 22 (1927); Kish, Survey Sampling (1965), for the effective n.
    """
    if not len(sums):
        return Estimate(math.nan, math.nan, math.nan)
    prompts, total = len(sums), float(counts.sum())
    p = float(sums.sum()) / total
    variance = float(np.square(sums - p * counts).sum()) / total**2 * prompts / max(prompts - 1, 1)
    n = prompts if variance == 0 else min(max(p * (1 - p) / variance, prompts), total)
    z = NormalDist().inv_cdf((1.0 + CONFIDENCE) / 2)
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1.0 + z * z / n
    return Estimate(p, max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0))


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return np.random.default_rng([seed, int.from_bytes(digest, "little")])

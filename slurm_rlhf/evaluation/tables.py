"""Figures by source, by length of the prompt and by length of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from slurm_rlhf.evaluation.estimators import Estimate, bootstrap
from slurm_rlhf.evaluation.responses import ScoredResponse
from slurm_rlhf.records import STOP

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Part:
    """Sums up the responses that belong together."""

    name: str
    prompts: int
    responses: int
    mean: Estimate  # of their scores
    truncated: float  # share that was cut off, 0 to 1
    response_tokens: float  # mean


def part_of(name: str, responses: Sequence[ScoredResponse], seed: int, figure: str) -> Part:
    """Sum up `responses`, at least one; `seed` and `figure` choose the draws of the interval."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for one in responses:
        sums[one.index] = sums.get(one.index, 0.0) + one.score
        counts[one.index] = counts.get(one.index, 0) + 1
    mean = bootstrap(np.array(list(sums.values())), np.array(list(counts.values()), np.float64), seed, figure)
    return Part(
        name,
        len(sums),
        len(responses),
        mean,
        float(np.mean([one.finish_reason != STOP for one in responses])),
        float(np.mean([one.response_tokens for one in responses])),
    )


def by_source(responses: Sequence[ScoredResponse], seed: int, figure: str) -> list[Part]:
    """Divide responses by the source of their prompt, by name; empty where no prompt has one."""
    groups = _groups(responses, lambda one: one.source)
    if set(groups) <= {""}:
        return []
    return [part_of(source, groups[source], seed, f"{figure}/{source}") for source in sorted(groups)]


def by_length(
    responses: Sequence[ScoredResponse], tokens: Callable[[ScoredResponse], int], seed: int, figure: str
) -> list[Part]:
    """Divide responses by a number of tokens, the shortest first; each part goes up to twice the length before."""
    groups = _groups(responses, lambda one: tokens(one).bit_length())
    return [part_of(_span(bits), groups[bits], seed, f"{figure}/{_span(bits)}") for bits in sorted(groups)]


def _span(bits: int) -> str:
    """Name the lengths with so many binary digits: 16-31."""
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return str(low) if low == high else f"{low}-{high}"


def _groups(responses: Sequence[ScoredResponse], key: Callable[[ScoredResponse], K]) -> dict[K, list[ScoredResponse]]:
    groups: dict[K, list[ScoredResponse]] = {}
    for one in responses:
        groups.setdefault(key(one), []).append(one)
    return groups

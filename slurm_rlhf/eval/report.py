"""Everything that an evaluation says about one data set, by source and length too, and about several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from slurm_rlhf.config.evaluation import EvalSettings
from slurm_rlhf.errors import cut
from slurm_rlhf.eval.estimators import Estimate, bootstrap, majority_score, pass_at_k, wilson
from slurm_rlhf.eval.responses import ScoredResponse
from slurm_rlhf.records import STOP

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Subset:
    """Sums up a subset of the responses to a data set."""

    name: str
    prompts: int
    responses: int
    mean: Estimate  # mean score
    truncated: float  # share of responses that were cut off, 0 to 1
    response_tokens: float  # mean number of tokens


def subset_of(name: str, responses: Sequence[ScoredResponse], seed: int, figure: str) -> Subset:
    """Sum up `responses`, at least one; `seed` and `figure` choose the draws of intervals that are drawn."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for one in responses:
        sums[one.index] = sums.get(one.index, 0.0) + one.score
        counts[one.index] = counts.get(one.index, 0) + 1
    totals, each = np.array(list(sums.values())), np.array(list(counts.values()), np.float64)
    binary = all(one.score in (0.0, 1.0) for one in responses)
    mean = wilson(totals, each) if binary else bootstrap(totals, each, seed, figure)
    return Subset(
        name,
        len(sums),
        len(responses),
        mean,
        float(np.mean([one.finish_reason != STOP for one in responses])),
        float(np.mean([one.response_tokens for one in responses])),
    )


def by_source(responses: Sequence[ScoredResponse], seed: int, figure: str) -> list[Subset]:
    """Divide responses by the source of their prompt, by name; empty where no prompt has one."""
    groups = _groups(responses, lambda one: one.source)
    if set(groups) <= {""}:
        return []
    return [subset_of(source, groups[source], seed, f"{figure}/{source}") for source in sorted(groups)]


def by_length(
    responses: Sequence[ScoredResponse], tokens: Callable[[ScoredResponse], int], seed: int, figure: str
) -> list[Subset]:
    """Divide responses by a number of tokens, the shortest first; each part goes up to twice the length before."""
    groups = _groups(responses, lambda one: tokens(one).bit_length())
    return [subset_of(_span(bits), groups[bits], seed, f"{figure}/{_span(bits)}") for bits in sorted(groups)]


def _span(bits: int) -> str:
    """Name the lengths with so many binary digits: 16-31."""
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return str(low) if low == high else f"{low}-{high}"


def _groups(responses: Sequence[ScoredResponse], key: Callable[[ScoredResponse], K]) -> dict[K, list[ScoredResponse]]:
    groups: dict[K, list[ScoredResponse]] = {}
    for one in responses:
        groups.setdefault(key(one), []).append(one)
    return groups


T = TypeVar("T")

LOOKED_AT = 20
"""Number of failed prompts that a report names, spread over the data set."""
_SHOWN = 2000  # characters of a prompt, and of a response


@dataclass(frozen=True, slots=True)
class FailedPrompt:
    """Shows a prompt with no correct response, and its first response."""

    index: int
    source: str
    prompt: str
    label: Any
    response: str
    answer: str | None
    score: float
    finish_reason: str
    error: str


@dataclass(frozen=True, slots=True)
class DataSetReport:
    """Says how good the responses to one data set are; figures of scores, each with its interval."""

    name: str
    path: str
    samples: int  # responses to each prompt
    temperature: float  # 0: greedy
    whole: Subset
    pass_at: dict[int, Estimate]  # k -> pass@k
    majority: Estimate | None  # score of the vote of all samples; None: there is one sample
    sources: list[Subset]
    prompt_lengths: list[Subset]  # subsets by tokens of the prompt
    response_lengths: list[Subset]  # subsets by tokens of the response
    errors: int  # prompts without a response; they count as wrong
    failed: int  # prompts with no correct response
    failures: list[FailedPrompt]

    def metrics(self) -> dict[str, float]:
        """Return its figures by name, as metrics.jsonl and TensorBoard have them."""
        mean = self.whole.mean
        figures = {"mean": mean.value, "mean_low": mean.low, "mean_high": mean.high}
        figures |= {f"pass@{k}": found.value for k, found in self.pass_at.items()}
        if self.majority is not None:
            figures[f"maj@{self.samples}"] = self.majority.value
        figures |= {"truncated": self.whole.truncated, "response_tokens": self.whole.response_tokens}
        return {f"eval/{self.name}/{name}": value for name, value in figures.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the report for eval.json; NaN, which JSON lacks, becomes null."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def report_of(settings: EvalSettings, responses: Sequence[ScoredResponse], seed: int) -> DataSetReport:
    """Sum up the responses to one data set, at least one; each prompt has `settings.n_samples_per_prompt` of them.

    `seed` chooses the draws of intervals.
    """
    prompts: dict[int, list[ScoredResponse]] = {}
    for one in sorted(responses, key=lambda one: (one.index, one.sample)):
        prompts.setdefault(one.index, []).append(one)
    groups, name, samples = list(prompts.values()), settings.name, settings.n_samples_per_prompt
    correct = [sum(one.score >= settings.pass_score for one in group) for group in groups]

    def each(figure: str, values: list[float]) -> Estimate:
        found, ones = np.array(values, np.float64), np.ones(len(values))
        share = bool(np.all((found >= 0) & (found <= 1)))
        return wilson(found, ones) if share else bootstrap(found, ones, seed, f"{name}/{figure}")

    failed = [group[0] for group, count in zip(groups, correct, strict=True) if not count]
    votes = [majority_score([one.answer for one in group], [one.score for one in group]) for group in groups]
    return DataSetReport(
        name=name,
        path=settings.path,
        samples=samples,
        temperature=settings.temperature,
        whole=subset_of(name, responses, seed, f"{name}/mean"),
        pass_at={k: each(f"pass@{k}", [pass_at_k(samples, count, k) for count in correct]) for k in settings.pass_k},
        majority=each("majority", votes) if samples > 1 else None,
        sources=by_source(responses, seed, f"{name}/source"),
        prompt_lengths=by_length(responses, lambda one: one.prompt_tokens, seed, f"{name}/prompt"),
        response_lengths=by_length(responses, lambda one: one.response_tokens, seed, f"{name}/response"),
        errors=sum(bool(group[0].error) for group in groups),
        failed=len(failed),
        failures=[_failure(one) for one in spread(failed, LOOKED_AT)],
    )


def overall(reports: Sequence[DataSetReport]) -> float:
    """Average the means of the data sets, each with the same weight: the metric `eval`."""
    return float(np.mean([report.whole.mean.value for report in reports]))


def spread(found: Sequence[T], most: int) -> list[T]:
    """Choose at most `most`, evenly spread: the end of a file is as interesting as its beginning."""
    if len(found) <= most:
        return list(found)
    return [found[place * len(found) // most] for place in range(most)]


def _failure(one: ScoredResponse) -> FailedPrompt:
    return FailedPrompt(
        one.index,
        one.source,
        cut(one.prompt, _SHOWN),
        one.label,
        cut(one.response, _SHOWN),
        one.answer if one.answer is None else cut(one.answer, _SHOWN),
        one.score,
        one.finish_reason,
        one.error,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

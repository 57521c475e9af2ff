"""Everything that an evaluation says about its data sets: pass@k, majority votes, means and how far they may be off.

Figures are of whole data sets, and of their parts by source and length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.config.evaluation import EvalSettings
from slurm_rlhf.errors import cut
from slurm_rlhf.records import STOP

F64 = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """Holds a response to a prompt of an evaluation, and its score."""

    dataset: str
    index: int  # row of the prompt in its file
    sample: int  # 0 .. n-1
    source: str  # source of the prompt; empty: the data set names none
    prompt: str
    response: str
    label: Any
    answer: str | None  # answer found in the response; None: the pattern finds none
    score: float
    reward: float
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    engine: int = 0
    error: str = ""  # reason why there is no response, whose score is then 0


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
    Trained on Code (2021), arXiv 2107.03374, section 2.1. 1 <= k <= n.
    """
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
    have the same interval everywhere. Source: Efron, Bootstrap Methods (1979).
    """
    # Prompts that add the same are one row: a draw of P prompts is then one multinomial draw of few numbers.
    kinds, times = np.unique(np.stack([sums, counts], axis=1), axis=0, return_counts=True)
    figure = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    dice = np.random.default_rng([seed, figure])
    drawn = dice.multinomial(len(sums), times / len(sums), size=RESAMPLES) @ kinds
    drawn = drawn[drawn[:, 1] > 0]
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [tail, 1.0 - tail])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))


def wilson(sums: F64, counts: F64) -> Estimate:
    """Estimate a share, sum(sums) / sum(counts), with its score interval, which does not collapse near 0 and 1.

    sums, counts: [P] as in `bootstrap`, with every score (or figure of a prompt) between 0 and 1. The responses to one
    prompt resemble each other: n is how many independent ones have the variance that is seen, at least P, at most all.
    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    Sources: Wilson, JASA 22 (1927); Kish, Survey Sampling (1965), for the effective n.
    """
    prompts, total = len(sums), float(counts.sum())
    p = float(sums.sum()) / total
    variance = float(np.square(sums - p * counts).sum()) / total**2 * prompts / max(prompts - 1, 1)
    n = prompts if variance == 0 else min(max(p * (1 - p) / variance, prompts), total)
    z = NormalDist().inv_cdf((1.0 + CONFIDENCE) / 2)
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1.0 + z * z / n
    return Estimate(p, max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0))


K = TypeVar("K", int, str)


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
    _, prompt = np.unique([one.index for one in responses], return_inverse=True)
    sums = np.bincount(prompt, [one.score for one in responses]).astype(np.float64)
    counts = np.bincount(prompt).astype(np.float64)
    binary = all(one.score in (0.0, 1.0) for one in responses)
    mean = wilson(sums, counts) if binary else bootstrap(sums, counts, seed, figure)
    return Subset(
        name,
        len(sums),
        len(responses),
        mean,
        float(np.mean([one.finish_reason != STOP for one in responses])),
        float(np.mean([one.response_tokens for one in responses])),
    )


def divided(
    responses: Sequence[ScoredResponse],
    key: Callable[[ScoredResponse], K],
    seed: int,
    figure: str,
    name: Callable[[K], str] = str,
) -> list[Subset]:
    """Sum up the parts of the responses that have the same `key`, in its order."""
    groups: dict[K, list[ScoredResponse]] = {}
    for one in responses:
        groups.setdefault(key(one), []).append(one)
    return [subset_of(name(part), groups[part], seed, f"{figure}/{name(part)}") for part in sorted(groups)]


def _span(bits: int) -> str:
    """Name the lengths with so many binary digits: 16-31; each part goes up to twice the length before."""
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return str(low) if low == high else f"{low}-{high}"


LOOKED_AT = 20
"""Number of failed prompts that a report names, spread over the data set."""
_SHOWN = 2000  # characters of a text
_FAILURE = ("index", "source", "prompt", "label", "response", "answer", "score", "finish_reason", "error")


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
    failures: list[dict[str, Any]]  # first response to some of those: the fields `_FAILURE`, texts cut

    def metrics(self) -> dict[str, float]:
        """Return its figures by name, as metrics.jsonl and TensorBoard have them."""
        mean = self.whole.mean
        figures = {"mean": mean.value, "mean_low": mean.low, "mean_high": mean.high}
        figures |= {f"pass@{k}": found.value for k, found in self.pass_at.items()}
        if self.majority is not None:
            figures[f"maj@{self.samples}"] = self.majority.value
        figures |= {"truncated": self.whole.truncated, "response_tokens": self.whole.response_tokens}
        return {f"eval/{self.name}/{name}": value for name, value in figures.items()}


def report_of(settings: EvalSettings, responses: Sequence[ScoredResponse], seed: int) -> DataSetReport:
    """Sum up the responses to one data set, at least one; each prompt has `settings.n_samples_per_prompt` of them.

    `seed` chooses the draws of intervals.
    """
    prompts: dict[int, list[ScoredResponse]] = {}
    for one in sorted(responses, key=lambda one: (one.index, one.sample)):
        prompts.setdefault(one.index, []).append(one)
    groups, name, samples = list(prompts.values()), settings.name, settings.n_samples_per_prompt
    named = any(one.source for one in responses)
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
        sources=divided(responses, lambda one: one.source, seed, f"{name}/source") if named else [],
        prompt_lengths=divided(responses, lambda one: one.prompt_tokens.bit_length(), seed, f"{name}/prompt", _span),
        response_lengths=divided(
            responses, lambda one: one.response_tokens.bit_length(), seed, f"{name}/response", _span
        ),
        errors=sum(bool(group[0].error) for group in groups),
        failed=len(failed),
        failures=[_failure(one) for one in spread(failed, LOOKED_AT)],
    )


def overall(reports: Sequence[DataSetReport]) -> float:
    """Average the means of the data sets, each with the same weight: the metric `eval`."""
    return float(np.mean([report.whole.mean.value for report in reports]))


def spread(found: Sequence[Any], most: int) -> list[Any]:
    """Choose at most `most`, evenly spread: the end of a file is as interesting as its beginning."""
    most = min(most, len(found))
    return [found[place * len(found) // most] for place in range(most)]


def _failure(one: ScoredResponse) -> dict[str, Any]:
    found = {name: getattr(one, name) for name in _FAILURE}
    return {name: cut(value, _SHOWN) if isinstance(value, str) else value for name, value in found.items()}


SHOWN = 3
"""Number of failures of each data set on the terminal; eval.json has more."""
_FIGURES = ("mean score (95 %)", "cut off", "tokens")
_WIDTH = 160  # characters of a prompt or response


def one_line(reports: Sequence[DataSetReport]) -> str:
    """Write the means in one line, for the console of a run."""
    each = ", ".join(f"{report.name} {_figure(report.whole.mean)}" for report in reports)
    return each if len(reports) == 1 else f"{overall(reports):.4f} ({each})"


def report_text(reports: Sequence[DataSetReport]) -> str:
    """Write the tables of all data sets, and a few failures of each."""
    rows = [["data set", "prompts", "samples", *_FIGURES, "pass@k", "majority"]]
    for report in reports:
        samples = f"{report.samples} {'greedy' if report.temperature == 0 else f't={report.temperature:g}'}"
        passed = " ".join(f"{k}: {found.value:.3f}" for k, found in report.pass_at.items())
        majority = "-" if report.majority is None else f"{report.majority.value:.3f}"
        rows.append([report.name, str(report.whole.prompts), samples, *_figures(report.whole), passed, majority])
    blocks = [table(rows)]
    for report in reports:
        for title, parts in (
            ("source", report.sources),
            ("tokens of the prompt", report.prompt_lengths),
            ("tokens of the response", report.response_lengths),
        ):
            if len(parts) > 1 or (parts and title == "source"):
                lines = [[title, "prompts", "responses", *_FIGURES]]
                lines += [[p.name or "(none)", str(p.prompts), str(p.responses), *_figures(p)] for p in parts]
                blocks.append(f"{report.name}, by {title}:\n{table(lines)}")
        blocks.append(_failures(report))
    return "\n\n".join(filter(None, blocks))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ([row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def _figures(part: Subset) -> list[str]:
    return [_figure(part.mean), f"{part.truncated:.1%}", f"{part.response_tokens:.0f}"]


def _failures(report: DataSetReport) -> str:
    if not report.failed:
        return ""
    lines = [f"{report.name}: {report.failed} of {report.whole.prompts} prompts have no correct response, for example"]
    if report.errors:
        lines[0] = f"{report.name}: {report.errors} prompts have no response at all\n{lines[0]}"
    for failure in report.failures[:SHOWN]:
        prompt, response, label = (cut(repr(str(failure[name])), _WIDTH) for name in ("prompt", "response", "label"))
        said = f"error: {failure['error']}" if failure["error"] else f"{response} ({failure['finish_reason']})"
        lines.append(f"  row {failure['index']}: {prompt}")
        lines.append(f"    -> {said}, score {failure['score']:g}, label {label}")
    return "\n".join(lines)


def _figure(found: Estimate) -> str:
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"

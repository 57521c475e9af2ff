"""Judge how far three computations of the same log-probs are apart, and show it, a line a model and precision."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np

from slurm_rlhf.eval.verdicts import BOUNDS
from slurm_rlhf.observe.metrics import finite
from slurm_rlhf.parity.subjects import Subject
from slurm_rlhf.records import F32

ENGINE, TRAINER, PLAIN = "vllm", "trainer", "hf"
SIDES = (ENGINE, TRAINER, PLAIN)
PAIRS = tuple(combinations(SIDES, 2))

FP32_BOUND = 1e-5
"""Nats that log-probs in fp32 may be apart at most: rounding, on CPUs."""

AGREE, DIFFER = "agree", "differ"
REFUSED, FAILED = "refused", "failed"
VERDICTS = {
    AGREE: "the same but for rounding",
    DIFFER: "further apart than rounding explains",
    REFUSED: "known not to work; nothing was computed",
    FAILED: "could not be computed",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """Names the precision of a comparison, as `--precision` takes it."""

    name: str
    dtype: Literal["bf16", "fp16", "fp32"]  # as ds.param_dtype
    fp32_head: bool = False  # as ds.fp32_lm_head

    def bound(self, fp32: float) -> tuple[float, str]:
        """Return (nats, "largest" or "mean") of the limit; `fp32`: the one for fp32.

        In 16 bits single tokens may be tenths apart; there it is the bound of a run's self-check.
        """
        if self.dtype == "fp32":
            return fp32, "largest"
        known = BOUNDS[self.dtype]["engine"]
        return known.limit, known.statistic


PRECISIONS = {
    each.name: each
    for each in (
        Precision("fp32", "fp32"),
        Precision("bf16", "bf16"),
        Precision("bf16+head", "bf16", fp32_head=True),
        Precision("fp16", "fp16"),
    )
}


@dataclass(frozen=True, slots=True)
class Apart:
    """Says how far two sides are apart: |difference of log-probs| in nats over the tokens."""

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class Line:
    """Holds what is known of one model in one precision."""

    model: str  # as the user named it, or the architecture of a random one
    precision: str  # a key of PRECISIONS; empty where nothing was computed
    verdict: str  # a key of VERDICTS
    reason: str = ""  # why the verdict is another than AGREE
    tokens: int = 0
    apart: Mapping[str, Apart] = field(default_factory=dict)  # "vllm-trainer" -> ...
    architecture: str = ""  # class in config.json
    seconds: float = 0.0
    log: tuple[str, ...] = ()  # its last lines, where it failed

    def to_json(self) -> dict[str, Any]:
        """Return plain data without NaN or infinity, which JSON lacks."""
        plain = asdict(self)
        plain["apart"] = {name: {k: finite(v) for k, v in asdict(pair).items()} for name, pair in self.apart.items()}
        return plain


def name_of(pair: tuple[str, str]) -> str:
    """Name a pair of SIDES."""
    return "-".join(pair)


def differences(logprobs: Mapping[str, F32]) -> dict[str, Apart]:
    """Compare each pair of sides; `logprobs`: side -> [A], of the same tokens. At least one token is needed."""
    found = {}
    for one, other in PAIRS:
        gaps = np.abs(logprobs[one].astype(np.float64) - logprobs[other].astype(np.float64))
        found[name_of((one, other))] = Apart(float(gaps.max()), float(gaps.mean()))
    return found


def judge(apart: Mapping[str, Apart], precision: Precision, fp32_bound: float = FP32_BOUND) -> tuple[str, str]:
    """Return (AGREE or DIFFER, the reason of the latter)."""
    limit, statistic = precision.bound(fp32_bound)
    figures = {name: getattr(pair, statistic) for name, pair in apart.items()}
    beyond = [name for name, figure in figures.items() if not figure < limit]  # a NaN is beyond
    if not beyond:
        return AGREE, ""
    worst = max(beyond, key=lambda name: math.inf if math.isnan(figures[name]) else figures[name])
    return DIFFER, (
        f"{worst}: {figures[worst]:.2g} nats ({statistic}; at most {limit:g} can be rounding){_odd_one(figures, limit)}"
    )


HINTS = {
    ENGINE: "vLLM computes this model otherwise than transformers: train and sample with another one",
    TRAINER: "the trainer computes it otherwise than transformers does: try another ds.attn_implementation",
    PLAIN: "engine and trainer agree, which is what training needs; plain transformers with eager attention is apart",
}


def _odd_one(figures: Mapping[str, float], limit: float) -> str:
    """Say which side is apart from the two others, where these agree."""
    for side in SIDES:
        others = next(pair for pair in PAIRS if side not in pair)
        if figures[name_of(others)] < limit:
            return f". {HINTS[side]}"
    return ". No two of them agree"


_FIGURE = 7
_PAIR = 2 * _FIGURE + 1
_COLUMNS = tuple(name_of(pair) for pair in PAIRS)


class Table:
    """Lays out lines one after the other, as they become known."""

    def __init__(self, subjects: Sequence[Subject], precisions: Sequence[str]) -> None:
        self._name = max([len(_label(subject.name, subject.architecture)) for subject in subjects] + [5])
        self._precision = max([*map(len, precisions), 9])

    def head(self) -> str:
        """Return the two lines above all others: the pairs, and what stands below each."""
        left = self._name + 2 + self._precision + 2 + 6
        pairs = "  ".join(column.center(_PAIR) for column in _COLUMNS)
        below = "  ".join(f"{'max':>{_FIGURE}} {'mean':>{_FIGURE}}" for _ in _COLUMNS)
        titles = f"{'model':{self._name}}  {'precision':{self._precision}}  {'tokens':>6}"
        return f"{'nats apart:':>{left}}  {pairs}\n{titles}  {below}  verdict"

    def row(self, line: Line, first: bool) -> str:
        """Return a line; its name stands before the `first` of a model only."""
        name = _label(line.model, line.architecture) if first else ""
        start = f"{name:{self._name}}  {line.precision:{self._precision}}  {line.tokens or '-':>6}"
        cells = []
        for column in _COLUMNS:
            pair = line.apart.get(column)
            cells.append(
                f"{_figure(pair.largest)} {_figure(pair.mean)}" if pair else f"{'-':>{_FIGURE}} {'-':>{_FIGURE}}"
            )
        return f"{start}  {'  '.join(cells)}  {line.verdict}"


def _label(name: str, architecture: str) -> str:
    return f"{name} ({architecture})" if architecture and architecture != name else name


def _figure(value: float) -> str:
    return f"{value:>{_FIGURE}.1e}" if math.isfinite(value) else f"{'NaN':>{_FIGURE}}"


def reasons(lines: Sequence[Line], width: int) -> str:
    """Tell of each line that does not agree why, and show what its process said last; empty: all agree."""
    told = []
    for line in lines:
        if line.verdict == AGREE:
            continue
        where = f"{line.model}, {line.precision}" if line.precision else line.model
        told.append(textwrap.fill(f"{where}: {line.verdict}: {line.reason}", width, subsequent_indent="  "))
        told += [f"    {said}" for said in line.log]
    return "\n".join(told)


def summary(lines: Sequence[Line]) -> str:
    """Count the verdicts: `11 agree, 1 differ, 2 refused`."""
    counted = Counter(line.verdict for line in lines)
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])

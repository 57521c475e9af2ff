"""Decides what the self-check has found, by pure functions: the table of bounds, the verdicts, their texts.

A result is a figure and its bound. One that failed ends the run with `CheckResult.error`; a share of a batch above its
limit is a warning. `self_check` measures the figures.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slurm_rlhf.records import F32, I32, Bool

Statistic = Literal["largest", "mean"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Limits how far two log-probs of the same token may be apart, in nats."""

    limit: float
    statistic: Statistic


_TABLES = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text(encoding="utf-8"))

FEW_BEYOND, FEW_TIMES = 0.01, 10
"""Share of the tokens that rounding may carry beyond a bound on the largest, and up to how many times that bound.

The quickstart's model in fp32 has one token in 330 that is 1.2e-4 off: its own log-prob is 5e-5 from fp64's.
"""

BOUNDS: dict[str, dict[str, Bound]] = {
    # Rounding alone makes 2e-6 on small models; a fault makes thousandths and more.
    "fp32": {check: Bound(1e-4, "mean" if "ratio" in check else "largest") for check in _TABLES["bf16"]},
    # A significand of 8 bits: single tokens may be tenths apart, so the mean counts. The same pass twice differs only
    # where a kernel adds up in no fixed order.
    "bf16": {check: Bound(limit, "mean") for check, limit in _TABLES["bf16"].items()},
    # A significand of 11 bits makes an eighth of bf16's rounding; the bounds are a fourth.
    "fp16": {check: Bound(limit / 4, "mean") for check, limit in _TABLES["bf16"].items()},
}
"""ds.param_dtype -> check -> bound. All comparisons at that precision take it from here."""


WORDS: dict[str, dict[str, str]] = _TABLES["words"]
"""Check -> its texts: the two sides that are compared, usual causes of a failure, keys and files to change."""

ALL_THE_SAME = "train.self_check = false leaves the self-check out"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Holds one figure of a check and its bound."""

    check: str  # key of WORDS
    figure: float
    bound: Bound
    detail: str  # name of the statistic, and number of tokens
    few: bool = False  # True: beyond the bound are so few tokens, and by so little, that rounding can be the reason

    @property
    def passed(self) -> bool:
        return self.figure <= self.bound.limit  # a NaN is no pass

    def warning(self) -> str:
        """Put a verdict with `few` tokens beyond the bound into a warning."""
        what = WORDS[self.check]["what"]
        return f"warning: {what} are {self.figure:.3g} nats apart ({self.detail}): rounding, where attention is sharp"

    def error(self) -> str:
        """Put a verdict that did not pass into the error for the user."""
        return f"self-check failed ({self.check}): {self.describe()}. {ALL_THE_SAME}."

    def describe(self) -> str:
        """Say which figures were compared, how far they are apart, the usual causes, and keys to change."""
        words = WORDS[self.check]
        return (
            f"{words['what']} are {self.figure:.3g} nats apart ({self.detail}); at most {self.bound.limit:g} can be "
            f"rounding. Usually: {words['usually']}. What to change: {words['change']}"
        )


def compare(
    check: str, ours: F32, theirs: F32, mask: Bool, param_dtype: str, engines: I32 | None = None
) -> CheckResult:
    """Compare two columns of log-probs [A] over the policy's own tokens, `mask`.

    `engines` [A]: number of the engine that sampled each token; the error then names the engine that is furthest off.
    """
    bound = BOUNDS[param_dtype][check]
    apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    # The number of tokens beyond the bound hints at the cause: one token has other causes than all tokens.
    beyond = int((~(apart[mask] <= bound.limit)).sum()) if bound.statistic == "largest" else 0
    found = f", {beyond} of them beyond; mean {apart[mask].mean():.2g}" if beyond else ""
    detail = f"{bound.statistic} of {int(mask.sum())} tokens{found}{_worst(apart, mask, engines, bound)}"
    figure = _figure(apart[mask], bound)
    few = 0 < beyond <= FEW_BEYOND * mask.sum() and figure <= FEW_TIMES * bound.limit
    return CheckResult(check, figure, bound, detail, bool(few))


def _figure(apart: np.ndarray, bound: Bound) -> float:
    if not apart.size:
        return 0.0
    return float(apart.max() if bound.statistic == "largest" else apart.mean())


def _worst(apart: np.ndarray, mask: Bool, engines: I32 | None, bound: Bound) -> str:
    if engines is None or not mask.any():
        return ""
    of_engine = {int(engine): _figure(apart[mask & (engines == engine)], bound) for engine in np.unique(engines[mask])}
    if len(of_engine) < 2:
        return ""
    worst = max(of_engine, key=lambda engine: math.inf if math.isnan(of_engine[engine]) else of_engine[engine])
    others = max(figure for engine, figure in of_engine.items() if engine != worst)
    return f"; engine {worst}: {of_engine[worst]:.3g}, the others at most {others:.3g}"


def first_ratio(ratio: float, approx_kl: float, param_dtype: str) -> CheckResult:
    """Judge the first optimizer step after the old log-probs: there the ratio must be 1, token by token.

    `ratio` and `approx_kl` (k3, half the mean square of a small log-ratio) are means over the step's tokens. The mean
    ratio alone would miss noise, which has as much above one as below it.
    """
    row = BOUNDS[param_dtype]
    spread = math.sqrt(2.0 * max(approx_kl, 0.0)) if math.isfinite(approx_kl) else math.nan
    off = abs(ratio - 1.0)
    detail = f"mean ratio {ratio:.6g}, root mean square of the log-ratio {spread:.3g}"
    if off <= row["ratio"].limit:
        return CheckResult("ratio", spread, row["log_ratio"], detail)
    return CheckResult("ratio", off, row["ratio"], detail)


def drift(mean: float, param_dtype: str) -> CheckResult:
    """Judge engine against actor in a later step; `mean` is over the tokens that the actor's own version sampled."""
    return CheckResult("engine", mean, Bound(BOUNDS[param_dtype]["engine"].limit, "mean"), "mean of the step's tokens")


FEW_NOT_FINITE = 0.01
"""Share of a batch's tokens whose log-prob of the engine may be NaN or infinite: they are left out of training."""


def engine_not_finite(lost: float, tokens: int) -> str:
    """Describe log-probs of the engine that are NaN or infinite: `lost` of `tokens`, both over the batch."""
    return (
        f"{lost:.0f} of {tokens} log-probs of the engine are NaN or infinite, and those tokens are left out of "
        f"training (correction/not_finite in the metrics); beyond {_percent(FEW_NOT_FINITE)} the engine is broken. "
        "Usually: its weights hold a NaN after an update, or its kernels overflow in half precision. What to change: "
        "look at the updates of the weights in the log, lower actor.learning_rate, or set vllm.dtype = fp32 (with "
        "rollout.engine = hf: ds.param_dtype)"
    )


# --- shares of prompts and of a batch of rewards ---------------------------------------------------------------------


SHARES: dict[str, dict[str, Any]] = _TABLES["shares"]
"""Share of a batch -> the limit above which there is a warning, the text after it in percent, and the warning."""
REWARD_SHARES = ("reward_clipped", "reward_constant", "truncated")
PROMPT_SHARES = ("prompts_dropped", "prompts_double_bos", "prompts_answered", "prompts_repeated")


def constant_share(rewards: F32, group: int) -> float:
    """Measure the share of groups of `group` rewards in which all are equal; rewards [N] in group order.

    Of rewards with several components, [N, K], all have to be equal. Groups of one say nothing: then the whole batch is
    one group. Raises ValueError when `group` does not divide N.
    """
    size = group if group > 1 else max(len(rewards), 1)
    values = np.asarray(rewards).reshape(len(rewards), -1) if len(rewards) else np.zeros((0, 1))
    groups = values.reshape(-1, size, values.shape[1])
    return float(np.mean((groups.max(axis=1) == groups.min(axis=1)).all(axis=1))) if len(rewards) else 0.0


def warnings(shares: dict[str, float], names: Sequence[str]) -> list[str]:
    """Write a sentence for each share above its limit."""
    return [
        f"warning: {_percent(shares[name])} {SHARES[name]['warning']}"
        for name in names
        if name in shares and not shares[name] <= SHARES[name]["limit"]
    ]


def not_finite(rewards: F32) -> str:
    """Write the error for rewards [N] of which some are NaN or infinite; empty: none is."""
    wrong = np.flatnonzero(~np.isfinite(rewards))
    if not wrong.size:
        return ""
    return (
        f"self-check failed (rewards): {wrong.size} of {len(rewards)} rewards are not finite, the first is "
        f"{rewards[wrong[0]]} for response {wrong[0]}. Usually: a division by zero, or a logarithm of zero. What to "
        "change: the function in reward.remote_url, or the model in reward.model_name_or_path."
    )


# --- one line for each group of checks --------------------------------------------------------------------------------


def agreement_line(title: str, verdicts: Sequence[CheckResult], names: dict[str, str]) -> str:
    """Write `self-check, TITLE: NAME 3e-07, NAME 0 nats (largest; at most 0.0001)`."""
    figures = ", ".join(f"{names[verdict.check]} {verdict.figure:.2g}" for verdict in verdicts)
    bound = verdicts[0].bound
    return f"self-check, {title}: {figures} nats ({bound.statistic}; at most {bound.limit:g})"


def shares_line(title: str, shares: dict[str, float], names: Sequence[str]) -> str:
    """Write `self-check, rewards: 0 % clipped, 12 % of the groups constant, 3 % truncated`."""
    words = ", ".join(f"{_percent(shares[name])} {SHARES[name]['words']}" for name in names if name in shares)
    return f"self-check, {title}: {words}"


def _percent(share: float) -> str:
    """Write a share in percent; a small one is not rounded to 0."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 or share == 0 else "under 1 %"

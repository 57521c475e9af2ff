"""The losses of preferences, against the formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from slurm_rlhf.algorithms.preferences import LOSSES, Pairs, bradley_terry, judged, kto, kto_kl

RANDOM = np.random.default_rng(5)
N = 6
TOKENS = {"chosen": RANDOM.integers(1, 9, N), "rejected": RANDOM.integers(1, 9, N)}
SUMS = {name: -RANDOM.uniform(0.05, 2, N) * TOKENS[name.removeprefix("ref_")] for name in TOKENS}
SUMS |= {f"ref_{name}": -RANDOM.uniform(0.05, 2, N) * TOKENS[name] for name in TOKENS}


def pairs() -> Pairs:
    tensors = {name: torch.tensor(values, requires_grad=not name.startswith("ref")) for name, values in SUMS.items()}
    counts = {f"{name}_tokens": torch.tensor(values, dtype=torch.float64) for name, values in TOKENS.items()}
    return Pairs(**tensors, **counts)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected(loss: str, beta: float, smoothing: float, gamma: float, i: int) -> float:
    c, r = SUMS["chosen"][i], SUMS["rejected"][i]
    rc, rr, nc, nr = SUMS["ref_chosen"][i], SUMS["ref_rejected"][i], TOKENS["chosen"][i], TOKENS["rejected"][i]
    if loss == "dpo":
        h = beta * ((c - rc) - (r - rr))
        return -(1 - smoothing) * math.log(sigmoid(h)) - smoothing * math.log(sigmoid(-h))
    if loss == "ipo":
        return float(((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)) ** 2)
    if loss == "simpo":
        h = beta * (c / nc - r / nr) - gamma
        return -(1 - smoothing) * math.log(sigmoid(h)) - smoothing * math.log(sigmoid(-h))
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (c / nc, r / nr)]
    return float(-c / nc - beta * math.log(sigmoid(math.log(odds[0] / odds[1]))))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("beta", "smoothing", "gamma"), [(0.1, 0.0, 0.5), (2.0, 0.2, 0.0)])
def test_a_loss_is_its_formula_and_its_gradient_the_slope(
    loss: str, beta: float, smoothing: float, gamma: float
) -> None:
    given = pairs()
    found = LOSSES[loss](given, beta, smoothing, gamma)
    wanted = [expected(loss, beta, smoothing, gamma, i) for i in range(N)]
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-12)
    found.sum().backward()
    for name in ("chosen", "rejected"):
        for i in range(N):
            kept, change = SUMS[name][i], 1e-6
            ends = []
            for side in (change, -change):
                SUMS[name][i] = kept + side
                ends.append(expected(loss, beta, smoothing, gamma, i))
            SUMS[name][i] = kept
            slope = (ends[0] - ends[1]) / (2 * change)
            assert getattr(given, name).grad[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_large_margins_overflow_nowhere() -> None:
    zero, ones = torch.zeros(2), torch.ones(2)
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = LOSSES["dpo"](Pairs(chosen, zero, zero, zero, ones, ones), 1.0, 0.0, 0.0)
    assert loss.tolist() == [0.0, 1e4]
    loss.sum().backward()
    assert chosen.grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("loss", ["dpo", "simpo", "orpo", "bradley_terry"])
def test_the_slope_is_half_where_both_answers_are_alike(loss: str) -> None:
    """DPO begins there: the policy is its own reference, and their log-probs are often equal bit for bit."""
    half, ones = torch.full((2,), -0.5), torch.ones(2)
    chosen = half.clone().requires_grad_()
    if loss == "bradley_terry":
        found = bradley_terry(chosen, half, torch.zeros(2))
    else:
        found = LOSSES[loss](Pairs(chosen, half, half, half, ones, ones), 1.0, 0.0, 0.0)
    found.sum().backward()
    # ORPO adds the slopes of the cross-entropy and of half of log(p / (1 - p)).
    wanted = -1 - 0.5 / (1 - math.exp(-0.5)) if loss == "orpo" else -0.5
    np.testing.assert_allclose(chosen.grad.numpy(), [wanted] * 2, rtol=1e-6)


def slopes(of: Callable[[list[float]], list[float]], at: list[float]) -> list[float]:
    """Take the central differences of the sum of `of`, for each number."""
    found = []
    for place in range(len(at)):
        ends = [sum(of([x + side * (i == place) for i, x in enumerate(at)])) for side in (1e-6, -1e-6)]
        found.append((ends[0] - ends[1]) / 2e-6)
    return found


@pytest.mark.parametrize(("beta", "kl", "weights"), [(0.1, 0.0, (1.0, 1.0)), (1.5, 0.7, (1.0, 1.33))])
def test_kto_is_its_formula_and_its_gradient_the_slope(beta: float, kl: float, weights: tuple[float, float]) -> None:
    ratios, good = [-2.0, 0.4, 3.0, -0.1, 0.0], [1.0, 0.0, 1.0, 0.0, 1.0]

    def wanted(at: list[float]) -> list[float]:
        return [
            weights[0] * (1 - sigmoid(beta * (h - kl))) if yes else weights[1] * (1 - sigmoid(beta * (kl - h)))
            for h, yes in zip(at, good, strict=True)
        ]

    given = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    found = kto(given, torch.tensor(good, dtype=torch.float64), torch.tensor(kl, dtype=torch.float64), beta, weights)
    np.testing.assert_allclose(found.detach().numpy(), wanted(ratios), rtol=1e-12)
    found.sum().backward()
    np.testing.assert_allclose(given.grad.numpy(), slopes(wanted, ratios), rtol=1e-5, atol=1e-9)


def test_the_divergence_of_kto_is_never_below_zero() -> None:
    assert (kto_kl(6.0, 4), kto_kl(-6.0, 4)) == (1.5, 0.0)


def test_bradley_terry_is_its_formula_and_its_gradient_the_slope() -> None:
    scores, margins = [1.5, -0.3, 2.0, 0.2, 0.1, -4.0], [0.0, 1.0, 0.5]

    def wanted(at: list[float]) -> list[float]:
        return [-math.log(sigmoid(at[i] - at[i + 3] - margin)) for i, margin in enumerate(margins)]

    given = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    found = bradley_terry(given[:3], given[3:], torch.tensor(margins, dtype=torch.float64))
    np.testing.assert_allclose(found.detach().numpy(), wanted(scores), rtol=1e-12)
    found.sum().backward()
    np.testing.assert_allclose(given.grad.numpy(), slopes(wanted, scores), rtol=1e-5, atol=1e-9)


def test_scores_are_judged_by_right_answers_and_by_how_sure_they_are() -> None:
    chosen, rejected = [2.0, 0.0, 1.0, 5.0, 0.1], [1.0, 0.2, 1.0, -5.0, 0.0]
    found = judged(np.array([each for pair in zip(chosen, rejected, strict=True) for each in pair], dtype=np.float32))
    right = [1, 0, 0.5, 1, 1]
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert found["margin"] == pytest.approx(np.mean(np.subtract(chosen, rejected)), rel=1e-6)
    sure = [sigmoid(abs(c - r)) for c, r in zip(chosen, rejected, strict=True)]  # bins of 0.05 from 0.5: 4, 0, 0, 9, 0
    gaps = [sure[0] - 1, sure[1] + sure[2] + sure[4] - 1.5, sure[3] - 1]
    assert found["calibration_error"] == pytest.approx(sum(map(abs, gaps)) / 5, rel=1e-6)
    assert (found["mean"], found["std"]) == pytest.approx(
        (np.mean(chosen + rejected), np.std(chosen + rejected)), rel=1e-6
    )

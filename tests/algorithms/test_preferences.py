"""The losses of preference pairs, against the formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slurm_rlhf.algorithms.preferences import LOSSES, Pairs

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
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [0.0, -1.0]

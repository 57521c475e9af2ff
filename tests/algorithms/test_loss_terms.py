"""Terms beside the policy loss (KL, likelihood of good responses, entropy): by hand, in float64, and in expectation."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from slurm_rlhf.algorithms.losses import (
    AGGREGATIONS,
    KL_LOSSES,
    entropy_bonus,
    kl_loss,
    loss_weights,
    nll_loss,
    positive_weights,
)
from slurm_rlhf.algorithms.policy_distance import approx_kl
from slurm_rlhf.config.keys import all_keys

EVERYWHERE = torch.ones(3, dtype=torch.bool)
LIMIT = 20.0


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k2", [0.0, math.log(2) ** 2 / 2, math.log(2) ** 2 / 2], [0.0, math.log(2), -math.log(2)]),
        ("k3", [0.0, 0.5 - 1 + math.log(2), 2 - 1 - math.log(2)], [0.0, 0.5, -1.0]),
        ("k3+", [0.0, 0.5 - 1 + math.log(2), 2 - 1 - math.log(2)], [0.0, math.log(2), -math.log(2)]),
    ],
)
def test_kl_by_hand(estimator: str, values: list[float], slopes: list[float]) -> None:
    """Ratios to the reference of 1, 2 and 1/2, with a coefficient of 0.1 in the weights."""
    new = torch.log(torch.tensor([0.25, 0.5, 0.125], dtype=torch.float64)).requires_grad_()
    reference, weights = torch.full((3,), math.log(0.25), dtype=torch.float64), torch.tensor([0.1, 0.1, 0.2])
    loss, metrics = kl_loss(new, reference, EVERYWHERE, 4.0, weights, estimator)
    assert loss.item() == pytest.approx((0.1 * values[1] + 0.2 * values[2]) / 4)
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([0.0, 0.1 * slopes[1] / 4, 0.2 * slopes[2] / 4])
    assert metrics["kl_loss"].item() == pytest.approx(sum(values))
    assert not metrics["kl_loss"].requires_grad
    assert approx_kl(new.detach().numpy(), reference.numpy(), estimator).tolist() == pytest.approx(values)


def test_the_reward_takes_every_estimator_and_the_loss_all_but_k1() -> None:
    assert set(KL_LOSSES) == {*all_keys()["algo.kl.estimator"].choices} - {"k1"}
    drawn = np.random.default_rng(0).normal(size=(2, 50), scale=9)
    assert np.array_equal(approx_kl(*drawn, "k3+"), approx_kl(*drawn, "k3"))


def test_mean_gradients_over_a_whole_vocabulary() -> None:
    """k2 and k3+ have the gradient of KL(policy || reference), k3 that of KL(reference || policy), k1 has none."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)

    def slope(value: torch.Tensor) -> list[float]:
        return torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()

    forward, backward = ((p.exp() * (p - q)).sum() for p, q in ((policy, reference), (reference, policy)))
    sampled = policy.detach().exp()  # every token as often as the policy samples it
    found = {name: slope((sampled * function(reference - policy)).sum()) for name, function in KL_LOSSES.items()}
    assert found["k2"] == pytest.approx(slope(forward))
    assert found["k3+"] == pytest.approx(slope(forward))
    assert found["k3"] == pytest.approx(slope(backward))
    assert found["k3"] != pytest.approx(slope(forward), rel=0.1)
    assert slope((sampled * (policy - reference)).sum()) == pytest.approx([0.0] * 7, abs=1e-15)


def kl_written_out(estimator: str, new: float, reference: float) -> tuple[float, float]:
    r = reference - new
    k3, slope = math.exp(min(r, LIMIT)) - 1 - min(r, LIMIT), (1 - math.exp(r)) if r <= LIMIT else 0.0
    return {"k2": (r * r / 2, -r), "k3": (k3, slope), "k3+": (k3, -r)}[estimator]


def drawn(masks: list[str], seed: int, scale: float) -> dict[str, Any]:
    """Responses with the given masks; what stands at masked positions is no number."""
    rng = np.random.default_rng(seed)
    mask = np.array([c == "1" for c in "".join(masks)], dtype=np.bool_)
    case = {"new": -rng.exponential(2.0, len(mask)), "entropy": rng.exponential(size=len(mask))}
    case["reference"] = case["new"] + scale * rng.normal(size=len(mask))
    for column in case.values():
        column[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e300], int((~mask).sum()))
    rewards = rng.choice([-1.0, 0.0, 0.5], len(masks)).astype(np.float32)
    return case | {"mask": mask, "offsets": np.cumsum([0, *map(len, masks)]), "rewards": rewards}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.text("01", max_size=6), min_size=1, max_size=7),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.01, 1.0, 100.0]),
    st.integers(1, 4),
)
def test_every_term_in_every_aggregation_however_the_step_is_cut(
    mode: str, masks: list[str], seed: int, scale: float, parts: int
) -> None:
    """Micro-batches add up to the formula over all of them: value and gradient, to 1e-6 of what the largest gives."""
    case, coef = drawn(masks, seed, scale), 0.3
    denominator, weights = loss_weights(mode, case["mask"], case["offsets"], 10)
    weight = np.ones(len(case["mask"]), dtype=np.float32) if weights is None else weights
    positive = positive_weights(case["rewards"], case["mask"], case["offsets"])
    spans = [range(*span) for span in pairwise(case["offsets"])]
    cuts = [torch.tensor([t for i in range(p, len(spans), parts) for t in spans[i]]).long() for p in range(parts)]
    new, entropy = (torch.from_numpy(case[name]).requires_grad_() for name in ("new", "entropy"))
    reference, mask, nll = (torch.from_numpy(column) for column in (case["reference"], case["mask"], positive))
    kl_weights, entropy_weights = torch.from_numpy(coef * weight), None if weights is None else torch.tensor(weights)

    def part(name: str, at: torch.Tensor) -> torch.Tensor:
        if name == "nll":
            return nll_loss(new[at], mask[at], nll[at], coef)[0]
        if name == "entropy":
            chosen = None if entropy_weights is None else entropy_weights[at]
            return entropy_bonus(entropy[at], mask[at], denominator, coef, chosen)[0]
        return kl_loss(new[at], reference[at], mask[at], denominator, kl_weights[at], name)[0]

    actions, count = np.flatnonzero(case["mask"]), max(denominator, 1.0)
    good = [t for i, span in enumerate(spans) if case["rewards"][i] > 0 for t in span if case["mask"][t]]
    for name in ("nll", "entropy", *KL_LOSSES):
        leaf = entropy if name == "entropy" else new
        losses = [part(name, at) for at in cuts]
        gradient = sum(torch.autograd.grad(loss, leaf)[0].numpy() for loss in losses)
        values, slopes = np.zeros(len(weight)), np.zeros(len(weight))
        if name == "nll":
            values[good], slopes[good] = -coef * case["new"][good] / max(len(good), 1), -coef / max(len(good), 1)
        elif name == "entropy":
            slopes[actions] = -coef * weight[actions] / count
            values[actions] = slopes[actions] * case["entropy"][actions]
        else:
            for t in actions:
                both = np.array(kl_written_out(name, case["new"][t], case["reference"][t]))
                values[t], slopes[t] = both * coef * weight[t] / count
        bounds = [1e-6 * max(1.0, np.abs(column).max(initial=0)) for column in (values, slopes)]
        assert sum(loss.item() for loss in losses) == pytest.approx(values.sum(), abs=bounds[0]), name
        assert_allclose(gradient, slopes, atol=bounds[1], err_msg=name)
        assert (gradient[~case["mask"]] == 0).all()


@pytest.mark.parametrize("estimator", KL_LOSSES)
def test_references_e_to_the_100_away_in_fp32(estimator: str) -> None:
    new = torch.tensor([-100.0, -1e-3, -1.0], requires_grad=True)
    loss, metrics = kl_loss(new, torch.tensor([-1e-3, -100, -1]), EVERYWHERE, 3.0, torch.full((3,), 0.1), estimator)
    assert math.isfinite(loss.item())
    assert math.isfinite(metrics["kl_loss"].item())
    assert torch.isfinite(torch.autograd.grad(loss, new)[0]).all()


def test_likelihood_of_good_responses_by_hand() -> None:
    """Two good responses of 1 and 2 actions (a gap, and one without any action), a bad one, one at zero."""
    mask = np.array([True, True, False, True, True, True, False])
    offsets = np.array([0, 1, 4, 5, 6, 7])
    weights = positive_weights(np.array([0.1, 2.0, -1.0, 0.0, 1.0], dtype=np.float32), mask, offsets)
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 0])
    logprobs = torch.tensor([-1.0, -2.0, math.nan, -3.0, -4.0, -5.0, math.inf], requires_grad=True)
    loss, metrics = nll_loss(logprobs, torch.from_numpy(mask), torch.from_numpy(weights), 0.1)
    assert loss.item() == pytest.approx(0.2)
    assert metrics["nll_loss"].item() == pytest.approx(2.0)
    slope = -0.1 / 3
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([slope, slope, 0, slope, 0, 0, 0])
    none_good = positive_weights(np.zeros(5, dtype=np.float32), mask, offsets)
    loss, _ = nll_loss(logprobs, torch.from_numpy(mask), torch.from_numpy(none_good), 0.1)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [0] * 7


def test_entropy_is_added_up_as_the_policy_loss() -> None:
    entropy = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    loss, metrics = entropy_bonus(entropy, EVERYWHERE, 2.0, 0.1, torch.tensor([0.5, 0.5, 1.0]))
    assert loss.item() == pytest.approx(-0.1 * (1.5 + 4) / 2)
    assert metrics["entropy"].item() == 7  # of tokens, as all metrics
    assert torch.autograd.grad(loss, entropy)[0].tolist() == pytest.approx([-0.025, -0.025, -0.05])

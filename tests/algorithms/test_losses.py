"""Losses of tokens and responses: aggregation, values, and the terms besides the policy's."""

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
from policy_loss import policy_loss

from slurm_rlhf.algorithms.losses import (
    AGGREGATIONS,
    KL_LOSSES,
    PolicyInputs,
    approx_kl,
    checked_loss,
    entropy_bonus,
    k3,
    kl_loss,
    loss_weights,
    nll_loss,
    positive_weights,
    value_loss,
)
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.errors import ConfigError


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def test_policy_loss_by_hand() -> None:
    # Ratios 2, 2, 1/2, 1/2 with advantages +, -, +, -: only the first and the last are clipped.
    logprobs = torch.log(tensor(0.8, 0.8, 0.2, 0.2)).requires_grad_()
    old = torch.log(tensor(0.4, 0.4, 0.4, 0.4))
    loss, metrics = policy_loss(logprobs, old, tensor(1, -1, 1, -1), torch.ones(4, dtype=torch.bool), 8.0, 0.2, 0.3)
    # -(1.3 * 1) - (2 * -1) - (0.5 * 1) - (0.8 * -1) = 1.0
    assert loss.item() == pytest.approx(1.0 / 8)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0 / 8, -0.5 / 8, 0.0])
    assert metrics["policy_loss"].item() == pytest.approx(1.0)
    assert metrics["clip_fraction"].item() == 2.0
    assert metrics["ratio"].item() == pytest.approx(5.0)
    assert metrics["approx_kl"].item() == pytest.approx(2 * (1 - math.log(2)) + 2 * (-0.5 + math.log(2)), rel=1e-5)
    assert not any(metric.requires_grad for metric in metrics.values())


def of_user(answer: Any) -> Any:
    x = torch.zeros(2, requires_grad=True)
    inputs = PolicyInputs(x, x.detach(), torch.ones(2), torch.ones(2) > 0, [2], None, 2.0, 0.2, 0.2)
    return checked_loss("mine", lambda given: answer(given.logprobs))(inputs)


def test_a_loss_of_the_users_is_called_as_it_is() -> None:
    loss, metrics = of_user(lambda x: (x.sum(), {"sum": x.sum()}))
    assert loss.requires_grad
    assert not metrics["sum"].requires_grad


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: 1 / 0, r"test_losses\.py:\d+: .* raised ZeroDivisionError: division by zero\. It has to return"),
        (lambda x: x.sum(), "raised TypeError: iteration over a 0-d tensor"),
        (lambda x: (1.0, {}), "raised AttributeError: 'float' object has no attribute 'dim'"),
        (lambda x: (x.sum(), {"loss": 1.0}), "raised AttributeError"),
        (lambda x: (x, {}), r"must return a scalar that has a gradient.*got a loss of shape \(2,\), metrics \[\]"),
        (lambda x: (x.detach().sum(), {}), r"got a loss of shape \(\) without a gradient"),
        (lambda x: (x.sum(), {"all": x}), r"metrics \['all'\]"),
    ],
)
def test_what_a_loss_of_the_users_may_not_answer(answer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_user(answer)


def test_value_loss_by_hand() -> None:
    # V_old 0, clip 0.5. V 2, R 1: max(1, 1/4); V 1/4, R 1: inside; V -2, R -1: max(1, 1/4); V 2, R 2: max(0, 9/4).
    values = tensor(2.0, 0.25, -2.0, 2.0).requires_grad_()
    everywhere = torch.ones(4, dtype=torch.bool)
    loss, metrics = value_loss(values, torch.zeros(4), tensor(1, 1, -1, 2), everywhere, 4.0, 0.5)
    assert loss.item() == pytest.approx((1 + 0.5625 + 1 + 2.25) / 2 / 4)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.25, -0.75 / 4, -0.25, 0.0])
    assert metrics["value_clip_fraction"].item() == 1.0
    assert metrics["value_loss"].item() == pytest.approx((1 + 0.5625 + 1 + 2.25) / 2)
    unclipped, metrics = value_loss(values, torch.zeros(4), tensor(1, 1, -1, 2), everywhere, 4.0, 0.0)
    assert unclipped.item() == pytest.approx((1 + 0.5625 + 1) / 2 / 4)
    assert metrics["value_clip_fraction"].item() == 0.0
    drawn = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    _, metrics = value_loss(drawn[0], drawn[0] + 0.1 * drawn[1].clamp(-1, 1), drawn[2], torch.ones(1000) > 0, 1.0, 0.5)
    assert metrics["value_clip_fraction"].item() == 0.0  # though V_old + (V - V_old) is not V to the last bit


def test_analytic_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantage = torch.randn(3, 20, dtype=torch.float64, generator=generator)
    mask = torch.arange(20) % 3 != 1
    new.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantage, mask, 13.0, 0.2, 0.28)[0], new)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, advantage, mask, 13.0, 0.3)[0], new)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e30])
def test_masked_positions_reach_neither_loss_nor_gradient(garbage: float) -> None:
    mask = torch.tensor([True, False])
    x = tensor(0.5, garbage).requires_grad_()
    y, z = tensor(0.25, garbage), tensor(2.0, garbage)
    losses = [
        policy_loss(x, y, z, mask, 1.0, 0.5, 0.5),
        value_loss(x, y, z, mask, 1.0, 0.5),
        entropy_bonus(x, mask, 1.0, 0.1),
    ]
    for loss, metrics in losses:
        assert math.isfinite(loss.item())
        assert all(math.isfinite(metric.item()) for metric in metrics.values())
        (gradient,) = torch.autograd.grad(loss, x)
        assert math.isfinite(gradient[0].item())
        assert gradient[0].item() != 0.0
        assert gradient[1].item() == 0.0


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_actions_at_all_is_loss_zero_and_not_nan(tokens: int) -> None:
    mask = torch.zeros(tokens, dtype=torch.bool)
    x = torch.ones(tokens, requires_grad=True)
    y = torch.zeros(tokens)
    for loss, metrics in (
        policy_loss(x, y, y, mask, 0.0, 0.2, 0.2),
        value_loss(x, y, y, mask, 0.0, 0.5),
        entropy_bonus(x, mask, 0.0, 0.1),
    ):
        assert loss.item() == 0.0
        assert all(metric.item() == 0.0 for metric in metrics.values())
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient.tolist() == [0.0] * tokens


def test_k3_gradient_is_finite_at_a_log_ratio_of_100() -> None:
    log_ratio = tensor(-100.0, -1.0, 0.0, 1.0, 100.0).requires_grad_()
    value = k3(log_ratio)
    (gradient,) = torch.autograd.grad(value.sum(), log_ratio)
    assert value.tolist() == pytest.approx([99.0, math.exp(-1), 0.0, math.e - 2, math.exp(20) - 21], rel=1e-5)
    assert gradient.tolist() == pytest.approx([-1.0, math.exp(-1) - 1, 0.0, math.e - 1, 0.0], rel=1e-5)
    from_numpy = approx_kl(torch.zeros(5).numpy(), log_ratio.detach().numpy(), "k3")
    assert value.tolist() == pytest.approx(from_numpy.tolist(), rel=1e-5)


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
    assert metrics["entropy"].item() == 7  # a sum over tokens, as all metrics are
    assert torch.autograd.grad(loss, entropy)[0].tolist() == pytest.approx([-0.025, -0.025, -0.05])

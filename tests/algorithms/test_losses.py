"""PPO's losses: by hand, against float64 written out token by token, and at the numbers that break them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loss import policy_loss

from slurm_rlhf.algorithms.losses import PolicyInputs, checked_loss, entropy_bonus, k3, value_loss
from slurm_rlhf.algorithms.policy_distance import approx_kl
from slurm_rlhf.errors import ConfigError

token = st.tuples(
    st.booleans(),
    st.floats(-150, 0, width=32),
    st.floats(-150, 0, width=32),
    st.floats(-50, 50, width=32),
)


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
    assert logprobs.grad is not None
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
        (lambda x: 1 / 0, r"test_losses\.py:\d+: .* raised ZeroDivisionError: division by zero\. It answers the loss"),
        (lambda x: x.sum(), "raised TypeError: iteration over a 0-d tensor"),
        (lambda x: (1.0, {}), "raised AttributeError: 'float' object has no attribute 'dim'"),
        (lambda x: (x.sum(), {"loss": 1.0}), "raised AttributeError"),
        (lambda x: (x, {}), r"must answer a scalar that has a gradient.*got a loss of shape \(2,\), metrics \[\]"),
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
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.25, -0.75 / 4, -0.25, 0.0])
    assert metrics["value_clip_fraction"].item() == 1.0
    assert metrics["value_loss"].item() == pytest.approx((1 + 0.5625 + 1 + 2.25) / 2)
    unclipped, metrics = value_loss(values, torch.zeros(4), tensor(1, 1, -1, 2), everywhere, 4.0, 0.0)
    assert unclipped.item() == pytest.approx((1 + 0.5625 + 1) / 2 / 4)
    assert metrics["value_clip_fraction"].item() == 0.0
    drawn = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    _, metrics = value_loss(drawn[0], drawn[0] + 0.1 * drawn[1].clamp(-1, 1), drawn[2], torch.ones(1000) > 0, 1.0, 0.5)
    assert metrics["value_clip_fraction"].item() == 0.0  # though V_old + (V - V_old) is not V to the last bit


def test_entropy_bonus_by_hand() -> None:
    entropy = tensor(1.0, math.nan, 3.0).requires_grad_()
    loss, metrics = entropy_bonus(entropy, torch.tensor([True, False, True]), 8.0, 0.5)
    assert loss.item() == pytest.approx(-0.25)
    assert metrics["entropy"].item() == 4.0
    loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [-0.0625, 0.0, -0.0625]


@settings(max_examples=150, deadline=None)
@given(st.lists(token, max_size=12), st.floats(0.01, 0.9), st.floats(0.01, 2.0))
def test_policy_loss_against_float64(tokens: list[tuple[bool, float, float, float]], low: float, high: float) -> None:
    mask = torch.tensor([t[0] for t in tokens], dtype=torch.bool)
    new, old, advantage = (tensor(*(t[i] for t in tokens)) for i in (1, 2, 3))
    new.requires_grad_()
    count = max(sum(t[0] for t in tokens), 1)
    loss, metrics = policy_loss(new, old, advantage, mask, float(count), low, high)
    (gradient,) = torch.autograd.grad(loss, new)

    total, slopes, scale = 0.0, [], 1.0
    for chosen, lp, old_lp, a in tokens:
        r = min(max(lp - old_lp, -20.0), 20.0)
        ratio = math.exp(r)
        binding = min(max(ratio, 1 - low), 1 + high) * a < ratio * a
        total -= min(max(ratio, 1 - low), 1 + high) * a if chosen and binding else ratio * a if chosen else 0.0
        slopes.append(-ratio * a / count if chosen and not binding and abs(lp - old_lp) <= 20 else 0.0)
        scale = max(scale, ratio * abs(a) if chosen and not binding else 0.0)
    assert loss.item() == pytest.approx(total / count, rel=1e-4, abs=1e-5 * scale)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-5)
    assert all(math.isfinite(metric.item()) for metric in metrics.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(token, max_size=12), st.sampled_from([0.0, 0.1, 5.0]))
def test_value_loss_against_float64(tokens: list[tuple[bool, float, float, float]], clip: float) -> None:
    mask = torch.tensor([t[0] for t in tokens], dtype=torch.bool)
    values, old, returns = (tensor(*(t[i] for t in tokens)) for i in (1, 2, 3))
    loss, _ = value_loss(values, old, returns, mask, 7.0, clip)
    total = 0.0
    for chosen, v, v_old, target in tokens:
        near = v_old + min(max(v - v_old, -clip), clip) if clip else v
        total += max((v - target) ** 2, (near - target) ** 2) / 2 if chosen else 0.0
    assert loss.item() == pytest.approx(total / 7, rel=1e-4, abs=1e-4)


def test_analytic_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantage = torch.randn(3, 20, dtype=torch.float64, generator=generator)
    mask = torch.arange(20) % 3 != 1
    new.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantage, mask, 13.0, 0.2, 0.28)[0], new)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, advantage, mask, 13.0, 0.3)[0], new)


def test_micro_batches_and_ranks_add_up_to_the_mean_over_all_tokens() -> None:
    """Uneven parts with the step's denominator add up to the gradient of the whole, unlike means of means."""
    generator = torch.Generator().manual_seed(1)
    new, old, advantage = torch.randn(3, 12, generator=generator)
    mask = torch.tensor([True] * 5 + [False] * 3 + [True] * 4)
    new.requires_grad_()
    whole, sums = policy_loss(new, old, advantage, mask, 9.0, 0.2, 0.2)
    (want,) = torch.autograd.grad(whole, new)
    got, metric = torch.zeros(12), 0.0
    for part in (slice(0, 2), slice(2, 9), slice(9, 12)):
        loss, metrics = policy_loss(new[part], old[part], advantage[part], mask[part], 9.0, 0.2, 0.2)
        got += torch.autograd.grad(loss, new)[0]
        metric += metrics["policy_loss"].item()
    assert torch.allclose(got, want)
    assert metric == pytest.approx(sums["policy_loss"].item())


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


def test_extreme_ratios_leave_finite_gradients() -> None:
    """exp(100) is infinite in fp32; with a negative advantage nothing else bounds the ratio."""
    new = tensor(0.0, 0.0, -100.0, -100.0).requires_grad_()
    mask = torch.ones(4, dtype=torch.bool)
    loss, metrics = policy_loss(new, tensor(-100, -100, 0, 0), tensor(1, -1, 1, -1), mask, 4.0, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(metric.item()) for metric in metrics.values())


def test_k3_gradient_is_finite_at_a_log_ratio_of_100() -> None:
    log_ratio = tensor(-100.0, -1.0, 0.0, 1.0, 100.0).requires_grad_()
    value = k3(log_ratio)
    (gradient,) = torch.autograd.grad(value.sum(), log_ratio)
    assert value.tolist() == pytest.approx([99.0, math.exp(-1), 0.0, math.e - 2, math.exp(20) - 21], rel=1e-5)
    assert gradient.tolist() == pytest.approx([-1.0, math.exp(-1) - 1, 0.0, math.e - 1, 0.0], rel=1e-5)
    from_numpy = approx_kl(torch.zeros(5).numpy(), log_ratio.detach().numpy(), "k3")
    assert value.tolist() == pytest.approx(from_numpy.tolist(), rel=1e-5)


def test_half_precision_is_computed_in_fp32() -> None:
    new = torch.zeros(1001, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1001, dtype=torch.bool)
    old, advantage = torch.zeros(1001, dtype=torch.bfloat16), torch.ones(1001, dtype=torch.bfloat16)
    loss, metrics = policy_loss(new, old, advantage, mask, 1001.0, 0.2, 0.2)
    assert metrics["ratio"].item() == 1001.0  # bf16 has no such number
    assert loss.dtype == torch.float32
    assert torch.autograd.grad(loss, new)[0].dtype == torch.bfloat16


def test_a_tensor_of_another_length_is_refused_and_not_broadcast() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"shape \(1,\) for an action mask of shape \(3,\)"):
        policy_loss(torch.ones(3), torch.ones(3), torch.ones(1), mask, 3.0, 0.2, 0.2)

"""How far two policies are apart, and the correction of an engine's log-probs by their ratio."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sampled_responses import response

from slurm_rlhf.algorithms.correction import correct, mask_not_finite
from slurm_rlhf.algorithms.losses import KLController, ages, approx_kl, staleness
from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule
from slurm_rlhf.errors import RunError
from slurm_rlhf.records import Experience, Trajectory, VersionSpan

Inputs = tuple[Experience, np.ndarray]
"""A batch, and the age of each of its tokens."""


def inputs_of(log_rho: Any, lens: list[int], mask: Any = None, advantages: Any = None, age: Any = None) -> Inputs:
    """Inputs in which the engine gave every token the log-prob -1."""
    count = len(log_rho)
    columns = {
        "logprobs": np.asarray(log_rho, dtype=np.float32) - 1,
        "rollout_logprobs": np.full(count, -1, dtype=np.float32),
        "advantages": np.ones(count, np.float32) if advantages is None else np.asarray(advantages, dtype=np.float32),
    }
    mask = np.ones(count, dtype=np.bool_) if mask is None else np.asarray(mask, dtype=np.bool_)
    sizes, none = np.array(lens, dtype=np.int32), np.zeros(len(lens), dtype=np.int32)
    exp = Experience(none, sizes, np.zeros(count, dtype=np.int32), mask, none.astype(np.float32), columns)
    return exp, np.zeros(count, dtype=np.int32) if age is None else np.asarray(age, dtype=np.int32)


def weights_of(rule: CorrectionRule | None, inputs: Inputs, delta: float = 0.0) -> list[float]:
    found, _ = correct(rule, delta, *inputs)
    assert found.dtype == np.float32
    return [float(weight) for weight in found]


# Two responses. Ratios 4, 1, 1/4 of the first, 2, 2 of the second: products 1 and 4, geometric means 1 and 2.
BY_HAND = np.log([4, 1, 0.25, 2, 2])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (CorrectionRule("token", "truncate", 0, 1.5), [1.5, 1, 0.25, 1.5, 1.5]),
        (CorrectionRule("token", "clip", 0.5, 3), [3, 1, 0.5, 2, 2]),
        (CorrectionRule("token", "mask", 0.5, 3), [0, 1, 0, 2, 2]),
        (CorrectionRule("sequence", "truncate", 0, 3), [1, 1, 1, 3, 3]),
        (CorrectionRule("sequence", "clip", 0.5, 3), [1, 1, 1, 3, 3]),
        (CorrectionRule("sequence", "mask", 0.5, 3), [4, 1, 0.25, 0, 0]),
        (CorrectionRule("geometric", "truncate", 0, 1.5), [1, 1, 1, 1.5, 1.5]),
        (CorrectionRule("geometric", "clip", 0.5, 3), [1, 1, 1, 2, 2]),
        (CorrectionRule("geometric", "mask", 0.5, 1.5), [4, 1, 0.25, 0, 0]),
        (PRESETS["tis"], [2, 1, 0.25, 2, 2]),
        (PRESETS["icepop"], [4, 1, 0, 2, 2]),  # 2 is inside of [0.5, 5], and so is 4; a quarter is not
        (PRESETS["seq_mask"], [4, 1, 0.25, 0, 0]),  # the geometric means are 1 and 2
    ],
)
def test_level_and_mode_by_hand(rule: CorrectionRule, expected: list[float]) -> None:
    assert weights_of(rule, inputs_of(BY_HAND, [3, 2])) == pytest.approx(expected, rel=1e-6)


def test_bounds_belong_to_what_is_kept() -> None:
    for level in ("token", "sequence", "geometric"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            assert weights_of(CorrectionRule(level, "mask", low, high), inputs_of([0.0, 0.0], [2])) == [1, 1]


def test_off_policy_mask_by_hand() -> None:
    """A negative advantage is dropped where the actor finds the response less likely than the engine did."""
    log_rho = [-0.3, -0.1, 0.3, 0.1, -0.3, -0.1]  # means of log(engine / actor): 0.2, -0.2, 0.2
    inputs = inputs_of(log_rho, [2, 2, 2], advantages=[-1, -1, -1, -1, 0, -1])
    assert weights_of(None, inputs, delta=0.1) == [0, 0, 1, 1, 1, 0]
    assert weights_of(None, inputs, delta=0.25) == [1] * 6
    both = weights_of(PRESETS["tis"], inputs, delta=0.1)
    assert both == pytest.approx([0, 0, math.exp(0.3), math.exp(0.1), math.exp(-0.3), 0], rel=1e-6)
    # A token that is dropped does not count as truncated, too.
    _, metrics = correct(CorrectionRule("token", "clip", 0.95, 1.05), 0.1, *inputs)
    assert metrics["correction/dropped"] == metrics["correction/truncated"] == 0.5


def test_metrics_by_hand() -> None:
    weights, metrics = correct(None, 0.0, *inputs_of(BY_HAND, [3, 2]))
    assert weights is None
    assert metrics["correction/dropped"] == metrics["correction/truncated"] == 0.0
    _, metrics = correct(PRESETS["tis"], 0.0, *inputs_of(np.log([4, 1, 1, 0.5]), [4]))
    logs = [math.log(4), 0, 0, -math.log(2)]
    assert metrics == pytest.approx(
        {
            "correction/log_rho_mean": 3 * math.log(2) / 4,
            "correction/log_rho_max": math.log(4),
            "correction/k1": -math.log(2) / 4,
            "correction/k3": sum(math.exp(x) - 1 - x for x in logs) / 4,
            "correction/chi2": (16 + 1 + 1 + 0.25) / 4 - 1,
            "correction/ess": 6.5**2 / (4 * 18.25),
            "correction/truncated": 0.25,
            "correction/dropped": 0.0,
        },
        rel=1e-6,
    )


def test_metrics_of_each_age() -> None:
    log_rho = np.array([0.1, -0.2, 0.4, 0.0])
    inputs = inputs_of(log_rho, [4], mask=[True, True, True, False], age=[2, 0, 2, 1])
    _, metrics = correct(PRESETS["icepop"], 0.0, *inputs)
    assert {name.split("/")[1] for name in metrics if "age_" in name} == {"age_0", "age_2"}  # age 1: no action
    for age, chosen in ((0, [1]), (2, [0, 2])):
        _, alone = correct(PRESETS["icepop"], 0.0, *inputs_of(log_rho[chosen], [len(chosen)]))
        found = {name: metrics[name.replace("correction", f"correction/age_{age}")] for name in alone}
        assert found == pytest.approx(alone, rel=1e-6, abs=1e-12)
    assert not any("age_" in name for name in correct(None, 0.0, *inputs_of(log_rho, [4]))[1])


@pytest.mark.parametrize("preset", [None, "tis", "icepop", "seq_mask"])
def test_a_batch_without_actions(preset: str | None) -> None:
    rule = PRESETS.get(preset or "")
    for inputs in (inputs_of([], []), inputs_of([], [0, 0]), inputs_of([1.0], [1], mask=[False])):
        weights, metrics = correct(rule, 0.0, *inputs)
        assert weights is None or not weights.any()
        assert set(metrics.values()) == {0.0}


def test_columns_of_other_lengths_are_refused() -> None:
    inputs = inputs_of(BY_HAND, [3, 2])
    inputs[0].columns["logprobs"] = np.zeros(1, dtype=np.float32)
    with pytest.raises(ValueError, match="logprobs has shape"):
        correct(None, 0.0, *inputs)


def test_a_nan_of_the_actor_is_not_hidden() -> None:
    for rule in PRESETS.values():
        assert any(math.isnan(weight) for weight in weights_of(rule, inputs_of([math.nan, 0.0], [2])))


def written_out(
    rule: CorrectionRule, delta: float, log_rho: list[float], mask: list[bool], advantages: list[float]
) -> list[float]:
    """The weights of one response."""
    logs = [x for x, acted in zip(log_rho, mask, strict=True) if acted]
    total = math.fsum(logs)
    of_response = {"sequence": total, "geometric": total / max(len(logs), 1)}
    weights = []
    for x, acted, advantage in zip(log_rho, mask, advantages, strict=True):
        own = math.exp(min(max(x, -20), 20))
        w = math.exp(min(max(of_response.get(rule.level, x), -20), 20))
        if rule.mode == "mask":
            w = own if rule.low <= w <= rule.high else 0.0
        elif rule.mode == "clip":
            w = min(max(w, rule.low), rule.high)
        else:
            w = min(w, rule.high)
        if delta and advantage < 0 and -total / max(len(logs), 1) > delta:
            w = 0.0
        weights.append(w if acted else 0.0)
    return weights


token = st.tuples(
    st.booleans(),
    st.sampled_from([-1.0, 0.0, 1.0]),  # advantage
    st.one_of(st.floats(-2, 2), st.sampled_from([-100.0, 100.0, 0.0])),
    st.sampled_from([0.0, math.nan, math.inf, -math.inf]) | st.just(0.0),  # added to the engine's log-prob
    st.integers(0, 3),
)
rules = st.builds(
    CorrectionRule,
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "mask", "clip"]),
    st.floats(0, 1),
    st.floats(1.05, 8),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(token, max_size=5), max_size=5), rules, st.sampled_from([0.0, 0.3]))
def test_weights_in_float64(responses: list[list[Any]], rule: CorrectionRule, delta: float) -> None:
    exp = experience(responses)
    lost = mask_not_finite(exp)
    tokens = [item for response in responses for item in response]
    mask = [acted and math.isfinite(bad) for acted, _, _, bad, _ in tokens]
    assert lost == sum(acted for acted, *_ in tokens) - sum(mask)
    assert exp.action_mask.tolist() == mask
    inputs = exp, np.array([item[4] for item in tokens], dtype=np.int32)
    weights, metrics = correct(rule, delta, *inputs)
    exact = exp.columns["logprobs"].astype(np.float64) - np.array([-3.0] * len(tokens))
    expected: list[float] = []
    for start, end in pairwise(exp.action_offsets):
        part = slice(start, end)
        expected += written_out(
            rule, delta, exact[part].tolist(), exp.action_mask[part].tolist(), exp.columns["advantages"][part].tolist()
        )
    # A sum that lies on a bound to the last bit may fall to either side of it.
    near = np.isclose(weights, expected, rtol=1e-5, atol=1e-12)
    assert near.all(), (weights[~near], np.array(expected)[~near])
    assert all(math.isfinite(value) for value in metrics.values())
    acted = exact[exp.action_mask].clip(-20, 20)
    if len(acted):
        rho = np.exp(acted)
        assert metrics["correction/k3"] == pytest.approx(np.mean(rho - 1 - acted), rel=1e-9, abs=1e-9)
        assert metrics["correction/chi2"] == pytest.approx(np.mean(rho**2) - 1, rel=1e-9, abs=1e-9)
        assert metrics["correction/ess"] == pytest.approx(rho.sum() ** 2 / (len(rho) * (rho**2).sum()), rel=1e-9)
        zero = np.mean(np.array(expected)[exp.action_mask] == 0)
        assert metrics["correction/dropped"] == pytest.approx(zero)


def experience(responses: list[list[Any]]) -> Experience:
    """Responses of (action?, advantage, log rho, what spoils the engine's log-prob, age); prompts of one token."""
    tokens = [item for response in responses for item in response]
    lens = np.array([len(response) for response in responses], dtype=np.int32)
    columns = {
        "logprobs": np.array([log_rho - 3 for _, _, log_rho, _, _ in tokens], dtype=np.float32),
        "rollout_logprobs": np.array([-3 + bad for *_, bad, _ in tokens], dtype=np.float32),
        "advantages": np.array([advantage for _, advantage, *_ in tokens], dtype=np.float32),
    }
    mask = np.array([acted for acted, *_ in tokens], dtype=np.bool_)
    ids = np.zeros(int(lens.sum()) + len(lens), dtype=np.int32)
    return Experience(np.ones_like(lens), lens, ids, mask, np.zeros(len(lens), dtype=np.float32), columns)


def test_small_estimates_do_not_cancel() -> None:
    assert_allclose(approx_kl([0.0], [1e-6], "k3"), [0.5e-12], rtol=1e-3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32)), max_size=8))
def test_extreme_log_ratios_stay_finite(pairs: list[tuple[float, float]]) -> None:
    logprobs, ref = (np.array([p[i] for p in pairs], dtype=np.float32) for i in (0, 1))
    r = [float(b) - float(a) for a, b in zip(logprobs, ref, strict=True)]
    want = {"k1": [-x for x in r], "k2": [x * x / 2 for x in r], "k3": [math.expm1(min(x, 20)) - min(x, 20) for x in r]}
    for estimator, numbers in want.items():
        got = approx_kl(logprobs, ref, estimator)
        assert got.dtype == np.float32
        assert np.isfinite(got).all()
        assert_allclose(got, numbers, rtol=1e-6, atol=1e-30)


def test_controllers_by_hand() -> None:
    fixed = KLController(0.01)
    assert fixed.update(100.0, 64) == 0.01
    fixed.load_state_dict({"coef": 0.5})
    assert fixed.coef == 0.01
    controller = KLController(0.1, target=6.0, horizon=1000)
    assert controller.update(6.6, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(600.0, 100) == pytest.approx(0.101 * 1.02)
    assert controller.update(0.0, 100) == pytest.approx(0.101 * 1.02 * 0.98)
    before = controller.coef
    assert controller.update(3.0, 0) == before
    with pytest.raises(RunError, match=r"mean KL per response is nan.*learning_rate"):
        controller.update(math.nan, 4)
    assert controller.coef == before
    # A batch that is larger than the horizon does not turn the coefficient negative.
    assert KLController(0.1, target=6.0, horizon=1000).update(0.0, 100_000) == pytest.approx(0.08)


def test_controller_state_goes_through_a_checkpoint() -> None:
    first, second = (KLController(0.1, target=6.0) for _ in range(2))
    first.update(9.0, 77)
    second.load_state_dict(first.state_dict())
    assert second.update(1.0, 5) == first.update(1.0, 5)


def test_staleness_of_a_batch() -> None:
    def sampled(*spans: tuple[int, int, int]) -> Trajectory:
        end = spans[-1][1] if spans else 0
        return response(0, tokens=end, versions=[VersionSpan(*span) for span in spans])

    batch = [sampled((0, 2, 3), (2, 3, 4)), sampled((0, 1, 5)), sampled(), sampled((0, 2, 4), (2, 4, 5))]
    age = ages(batch, 5)
    assert age.tolist() == [2, 2, 1, 0, 1, 1, 0, 0]
    mask = np.array([True] * 7 + [False])
    assert staleness(batch, age, mask) == {
        "stale_tokens": pytest.approx(5 / 7),
        "staleness_max": 2,
        "mixed_responses": 0.5,
    }
    nothing = {"stale_tokens": 0, "staleness_max": 0, "mixed_responses": 0}
    assert staleness(batch[1:2], ages(batch[1:2], 5), mask[:1]) == nothing
    assert staleness([], ages([], 5), mask[:0]) == nothing

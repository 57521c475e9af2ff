"""Policy losses of the table: by hand, and against value and gradient written out in float64, token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from slurm_rlhf.algorithms.losses import AGGREGATIONS, PolicyInputs, loss_weights
from slurm_rlhf.algorithms.methods.ppo import GAE
from slurm_rlhf.algorithms.methods.reinforce import DR_GRPO
from slurm_rlhf.algorithms.packed import step_mean
from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES, aggregation_of, clip_range
from slurm_rlhf.config.schema_models import Actor
from slurm_rlhf.docs.pages import page

LONGEST = 10
LIMIT = 20.0  # bound of the log-ratio where losses take exp of it


def inputs_of(ratios: list[float], advantages: list[float], old: float = 0.25, **changes: Any) -> PolicyInputs:
    """One response of tokens that had the probability `old`."""
    count = len(ratios)
    logprobs = torch.log(torch.tensor(ratios, dtype=torch.float64) * old).requires_grad_()
    before, mask = torch.full((count,), math.log(old), dtype=torch.float64), torch.ones(count, dtype=torch.bool)
    made = PolicyInputs(logprobs, before, torch.tensor(advantages).double(), mask, [count], None, 4.0, 0.2, 0.3)
    return replace(made, **changes)


def computed(name: str, inputs: PolicyInputs) -> tuple[float, list[float], dict[str, float]]:
    loss, metrics = POLICY_LOSSES[name].function(inputs)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert not any(metric.requires_grad for metric in metrics.values())
    return loss.item(), gradient.tolist(), {key: value.item() for key, value in metrics.items()}


def test_dual_clip_by_hand() -> None:
    # A ratio of 5 is cut at 3 where the advantage is negative; one of 2 is not, nor a positive advantage.
    inputs = inputs_of([4.0, 2.0, 4.0], [-1, -1, 1], old=0.2, dual_clip=3.0)
    loss, gradient, metrics = computed("ppo", inputs)
    assert loss == pytest.approx((3 + 2 - 1.3) / 4)
    assert gradient == pytest.approx([0, 2 / 4, 0])
    assert metrics["clip_fraction"] == 2
    assert computed("ppo", replace(inputs, dual_clip=0.0))[0] == pytest.approx((4 + 2 - 1.3) / 4)


def test_gspo_by_hand() -> None:
    # Two responses, ratios 4 and 1 (and a token of a tool): s = 2; and 1/2: s = 1/2. The first is clipped at 1.3.
    inputs = inputs_of([4.0, 4.0, 1.0, 0.5], [1, 9, 1, 1], action_mask=torch.tensor([True, False, True, True]))
    inputs = replace(inputs, response_lens=[3, 0, 1], weights=torch.tensor([0.5, 0.5, 0.5, 1.0]), denominator=2.0)
    loss, gradient, metrics = computed("gspo", inputs)
    assert loss == pytest.approx(-(1.3 + 0.5) / 2)
    assert gradient == pytest.approx([0, 0, 0, -0.5 / 2])
    assert metrics["clip_fraction"] == 2
    assert metrics["ratio"] == pytest.approx(2 + 2 + 0.5)
    # With negative advantages nothing clips a high ratio: each of the two actions gets half of -s A.
    loss, gradient, _ = computed("gspo", replace(inputs, advantages=-inputs.advantages))
    assert loss == pytest.approx((2 + 0.8) / 2)
    assert gradient == pytest.approx([0.5 * 2 / 2, 0, 0.5 * 2 / 2, 0])
    assert computed("gspo", replace(inputs, advantages=-inputs.advantages, dual_clip=1.5))[0] == pytest.approx(2.3 / 2)


def test_cispo_by_hand() -> None:
    # Weights 1.3 (clipped from 2), 0.8 (from 1/2) and 1: every token learns, by its weight.
    inputs = inputs_of([2.0, 0.5, 1.0], [1, 1, -1])
    loss, gradient, metrics = computed("cispo", inputs)
    logs = [math.log(0.5), math.log(0.125), math.log(0.25)]
    assert loss == pytest.approx((-1.3 * logs[0] - 0.8 * logs[1] + logs[2]) / 4)
    assert gradient == pytest.approx([-1.3 / 4, -0.8 / 4, 1 / 4])
    assert metrics["clip_fraction"] == 2
    # The range that it is used with: no bound below, a weight of at most 5.
    low, high = clip_range("cispo", [], 0.2)
    _, gradient, _ = computed("cispo", replace(inputs_of([6, 1e-6], [1, 1], old=0.1), clip_low=low, clip_high=high))
    assert gradient == pytest.approx([-5 / 4, -1e-6 / 4])


def test_sapo_by_hand() -> None:
    inputs = inputs_of([1.0, 1.0, 3.0, 3.0], [1, -1, 1, -1], sapo_temperatures=(1.0, 2.0))
    loss, gradient, metrics = computed("sapo", inputs)
    gates = [1 / (1 + math.exp(-tau * 2)) for tau in (1.0, 2.0)]
    assert loss == pytest.approx((-4 * 0.5 + 2 * 0.5 - 4 * gates[0] + 2 * gates[1]) / 4)
    # At ratio 1 the slope of the gate is 1; at 3 it is 4 g (1 - g), times the ratio.
    slopes = [4 * gate * (1 - gate) * 3 for gate in gates]
    assert gradient == pytest.approx([-1 / 4, 1 / 4, -slopes[0] / 4, slopes[1] / 4])
    assert "clip_fraction" not in metrics


def test_dppo_tv_by_hand() -> None:
    # Moves from 0.4 to 0.8 and to 0.1 are beyond 0.3 and 0.2, along the advantage (1, 4) or against it (2, 3).
    inputs = inputs_of([2.0, 2.0, 0.25, 0.25], [1, -1, 1, -1], old=0.4)
    loss, gradient, metrics = computed("dppo_tv", inputs)
    assert loss == pytest.approx((2 - 0.25) / 4)
    assert gradient == pytest.approx([0, 2 / 4, -0.25 / 4, 0])
    assert metrics["clip_fraction"] == 2
    # Probabilities lie on either side of both bounds, 0.7 and 0.2.
    near = inputs_of([0.699 / 0.4, 0.701 / 0.4, 0.201 / 0.4, 0.199 / 0.4], [1, 1, -1, -1], old=0.4)
    assert computed("dppo_tv", near)[1] == pytest.approx([-0.699 / 1.6, 0, 0.201 / 1.6, 0])
    # A rare token may move by any ratio: from 0.001 to 0.1.
    assert computed("dppo_tv", inputs_of([100.0], [1], old=0.001))[1] == pytest.approx([-100 / 4])


# --- value and gradient in float64, in parts and as a whole ----------------------------------------------------------


def written_out(name: str, case: dict[str, Any], settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and slope of every token, [A] each: scalar arithmetic, no tensors."""
    low, high, dual = settings["clip_low"], settings["clip_high"], settings["dual_clip"]
    losses, slopes = np.zeros(len(case["mask"])), np.zeros(len(case["mask"]))
    for start, end in pairwise(case["offsets"]):
        actions = [t for t in range(start, end) if case["mask"][t]]
        raw = {t: case["new"][t] - case["old"][t] for t in actions}
        of_sequence = sum(raw.values()) / max(len(raw), 1)
        for t in actions:
            log_ratio, a = of_sequence if name == "gspo" else raw[t], case["advantages"][t]
            ratio, inside = math.exp(min(max(log_ratio, -LIMIT), LIMIT)), abs(log_ratio) <= LIMIT
            clipped = min(max(ratio, 1 - low), 1 + high)
            if name in ("ppo", "gspo"):
                gain, slope = ratio * a, ratio * a * inside
                if clipped * a < gain:
                    gain, slope = clipped * a, 0.0
                if dual and a < 0 and gain < dual * a:
                    gain, slope = dual * a, 0.0
            elif name == "cispo":
                gain, slope = clipped * a * case["new"][t], clipped * a
            elif name == "sapo":
                tau = settings["sapo_temperatures"][0 if a > 0 else 1]
                gate = 0.5 * (1 + math.tanh(tau * (ratio - 1) / 2))
                gain, slope = 4 / tau * gate * a, 4 * gate * (1 - gate) * ratio * a * inside
            else:
                moved = math.exp(case["new"][t]) - math.exp(case["old"][t])
                keep = moved <= high if a > 0 else moved >= -low
                gain, slope = ratio * a * keep, ratio * a * keep * inside
            losses[t], slopes[t] = -gain, -slope
    return losses, slopes


def drawn(masks: list[str], seed: int, scale: float) -> dict[str, Any]:
    """Responses with the given masks; what stands at masked positions is no number."""
    rng = np.random.default_rng(seed)
    mask = np.array([c == "1" for c in "".join(masks)], dtype=np.bool_)
    case = {"old": -rng.exponential(2.0 * max(1.0, scale), len(mask)), "advantages": rng.normal(size=len(mask))}
    case["new"] = np.minimum(case["old"] + scale * rng.normal(size=len(mask)), 0.0)
    case["correction"] = rng.choice([0.0, 0.3, 1.0, 2.0], len(mask))
    for column in case.values():
        column[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e300], int((~mask).sum()))
    return case | {"mask": mask, "offsets": np.cumsum([0, *map(len, masks)]), "lens": [len(m) for m in masks]}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.text("01", max_size=6), min_size=1, max_size=7),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.01, 0.5, 5.0, 100.0]),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_loss_in_every_aggregation_however_the_step_is_cut(
    name: str, mode: str, masks: list[str], seed: int, scale: float, parts: int, corrected: bool
) -> None:
    """Micro-batches add up to the formula over all of them: value and gradient, to 1e-6 of what the largest gives."""
    case = drawn(masks, seed, scale)
    settings = {
        "clip_low": 0.2,
        "clip_high": 0.3,
        "dual_clip": [0.0, 3.0][seed % 2],
        "sapo_temperatures": (1.0, 1.05),
    }
    denominator, weights = loss_weights(mode, case["mask"], case["offsets"], LONGEST)
    weight = np.ones(len(case["mask"])) if weights is None else weights.astype(np.float64)
    if corrected:
        weight = weight * case["correction"]
    tensors = {name: torch.from_numpy(case[name]) for name in ("new", "old", "advantages", "mask")}
    new, weigh = tensors["new"].requires_grad_(), torch.from_numpy(weight) if corrected or weights is not None else None
    total, gradient = 0.0, np.zeros(len(weight))
    for part in range(parts):
        rows = [i for i in range(len(masks)) if i % parts == part]
        at = torch.tensor([t for i in rows for t in range(*case["offsets"][i : i + 2])], dtype=torch.int64)
        columns = [tensors[key][at] for key in ("new", "old", "advantages", "mask")]
        lens, part_weight = [case["lens"][i] for i in rows], None if weigh is None else weigh[at]
        loss, metrics = POLICY_LOSSES[name].function(PolicyInputs(*columns, lens, part_weight, denominator, **settings))
        assert all(math.isfinite(metric.item()) for metric in metrics.values())
        total += loss.item()
        gradient += torch.autograd.grad(loss, new)[0].numpy()

    losses, slopes = written_out(name, case, settings)
    chosen = np.where(case["mask"], weight, 0.0) / max(denominator, 1.0)
    assert math.isfinite(total)
    assert total == pytest.approx((losses * chosen).sum(), abs=1e-6 * max(1.0, np.abs(losses * chosen).max(initial=0)))
    assert_allclose(gradient, slopes * chosen, atol=1e-6 * max(1.0, np.abs(slopes * chosen).max(initial=0)))
    assert (gradient[~case["mask"]] == 0).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ratios_of_e_to_the_100_in_fp32(name: str) -> None:
    """Such ratios come either way, with either advantage, in whole responses and single tokens."""
    new = torch.tensor([-1e-3, -1e-3, -100, -100, -100, -0.5], requires_grad=True)
    old = torch.tensor([-100, -100, -1e-3, -1e-3, -0.5, -100])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0])
    inputs = PolicyInputs(new, old, advantages, torch.ones(6) > 0, [1, 1, 1, 1, 2], None, 6.0, 0.2, 0.2)
    for dual_clip in (0.0, 3.0):
        loss, metrics = POLICY_LOSSES[name].function(replace(inputs, dual_clip=dual_clip))
        (gradient,) = torch.autograd.grad(loss, new)
        case = {"new": new.detach(), "old": old, "advantages": advantages}
        case = {column: values.double().numpy() for column, values in case.items()}
        bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": dual_clip}
        losses, slopes = written_out(
            name,
            case | {"mask": np.ones(6, np.bool_), "offsets": [0, 1, 2, 3, 4, 6]},
            bounds | {"sapo_temperatures": inputs.sapo_temperatures},
        )
        assert loss.item() == pytest.approx(losses.sum() / 6, rel=1e-5)
        assert_allclose(gradient, slopes / 6, rtol=1e-5, atol=1e-30)
        assert all(math.isfinite(metric.item()) for metric in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("lens", [[], [0], [2, 0]])
def test_no_actions_at_all_is_loss_zero_and_still_connected(name: str, lens: list[int]) -> None:
    new = torch.full((sum(lens),), math.nan, requires_grad=True)
    nothing = torch.zeros(len(new), dtype=torch.bool)
    loss, metrics = POLICY_LOSSES[name].function(PolicyInputs(new, new, new, nothing, lens, new, 0.0, 0.2, 0.2))
    assert loss.item() == 0
    assert all(metric.item() == 0 for metric in metrics.values())
    assert torch.autograd.grad(loss, new)[0].tolist() == [0.0] * len(new)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_half_precision_is_computed_in_fp32_and_other_lengths_are_refused(name: str) -> None:
    new = torch.full((1001,), -0.5, dtype=torch.bfloat16, requires_grad=True)
    column, mask = new.detach(), torch.ones(1001, dtype=torch.bool)
    inputs = PolicyInputs(new, column, column, mask, [1001], None, 1001.0, 0.2, 0.2)
    loss, metrics = POLICY_LOSSES[name].function(inputs)
    assert loss.dtype == torch.float32
    assert metrics["ratio"].item() == 1001.0  # bf16 has no such number
    for column in ("old_logprobs", "advantages", "weights"):
        with pytest.raises(ValueError, match=r"shape \(1,\) for an action mask of shape \(1001,\)"):
            POLICY_LOSSES[name].function(replace(inputs, **{column: torch.ones(1)}))


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_schema_names_what_the_tables_have() -> None:
    hints = get_type_hints(Actor)
    assert get_args(hints["policy_loss_type"]) == tuple(POLICY_LOSSES)
    assert get_args(hints["loss_agg_mode"]) == ("", *AGGREGATIONS)
    assert all(hasattr(Actor(), key) for row in POLICY_LOSSES.values() for key in row.keys)
    assert {row.aggregation for row in POLICY_LOSSES.values()} <= {"", *AGGREGATIONS}


def test_the_documentation_has_a_row_for_each() -> None:
    section = page("algorithms").split("## Which algorithm")[1].split("\n## ")[0]
    for name, row in POLICY_LOSSES.items():
        (line,) = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
        if row.clip_range:
            assert line.split(" | ")[-1].startswith(" ".join(f"{side:g}" for side in row.clip_range)), name
    assert all(f"`{mode}`" in section for mode in AGGREGATIONS)


def test_a_range_is_the_keys_or_the_usual_one() -> None:
    assert clip_range("ppo", [], 0.1) == (0.1, 0.1)
    assert clip_range("gspo", [], 0.1) == (3e-4, 4e-4)
    assert clip_range("cispo", [], 0.1) == (1.0, 4.0)
    assert clip_range("dppo_tv", [], 0.1) == (0.2, 0.2)
    for name in POLICY_LOSSES:
        assert clip_range(name, [0.2, 0.28], 0.1) == (0.2, 0.28)


def test_an_aggregation_is_the_keys_or_the_losss_or_the_algorithms() -> None:
    usual, own = GAE.aggregation, DR_GRPO.aggregation
    assert (usual, own) == ("token-mean", "seq-mean-token-sum-norm")
    assert aggregation_of("", "ppo", usual) == aggregation_of("", "cispo", usual) == usual
    assert aggregation_of("", "gspo", usual) == aggregation_of("", "sapo", usual) == "seq-mean-token-mean"
    assert aggregation_of("", "ppo", own) == aggregation_of("", "dppo_tv", own) == own
    assert aggregation_of("token-mean", "gspo", own) == "token-mean"


def test_a_mean_of_the_step_divides_by_its_number_and_is_zero_without_any() -> None:
    assert step_mean(torch.tensor(6.0), 3.0).item() == 2.0
    assert step_mean(torch.tensor(0.0), 0.0).item() == 0.0

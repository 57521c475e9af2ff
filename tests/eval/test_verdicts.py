"""The self-check's verdicts: what passes, what fails at which precision, and what is said of it."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from sampled_responses import response

from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.schema import Config
from slurm_rlhf.environments.records import CALLS, RAISED, UNKNOWN
from slurm_rlhf.errors import SelfCheckError
from slurm_rlhf.eval.verdicts import (
    BOUNDS,
    PROMPT_SHARES,
    REWARD_SHARES,
    SHARES,
    WORDS,
    agreement_line,
    compare,
    constant_share,
    drift,
    first_ratio,
    not_finite,
    shares_line,
    warnings,
)
from slurm_rlhf.records import LENGTH, LOST, REPETITION, STOP, Experience, Trajectory, VersionSpan, pack
from slurm_rlhf.rewards.scored import Rewards
from slurm_rlhf.run.self_check import PromptFindings, SelfCheck
from slurm_rlhf.run.step_metrics import agreement_metrics, sample_metrics

ALL = np.ones(8, dtype=np.bool_)
LOGPROBS = np.linspace(-4, -1, 8, dtype=np.float32)


def off_by(*nats: float) -> np.ndarray:
    moved = LOGPROBS.copy()
    moved[: len(nats)] += np.asarray(nats, dtype=np.float32)
    return moved


def test_the_table_has_the_issues_figures_and_words_for_every_check() -> None:
    assert (BOUNDS["fp32"]["engine"].limit, BOUNDS["fp32"]["engine"].statistic) == (1e-4, "largest")
    assert (BOUNDS["bf16"]["engine"].limit, BOUNDS["bf16"]["engine"].statistic) == (2e-2, "mean")
    for check, bound in BOUNDS["fp16"].items():
        assert (bound.limit, bound.statistic) == (BOUNDS["bf16"][check].limit / 4, "mean")
    for row in BOUNDS.values():
        assert row.keys() == WORDS.keys() | {"log_ratio"}
    assert set(SHARES) == {*REWARD_SHARES, *PROMPT_SHARES}


def test_keys_that_the_words_name_are_keys() -> None:
    keys, files = set(all_keys()), {"config.json", "tokenizer_config.json", "generation_config.json"}
    texts = [word["change"] for word in WORDS.values()] + [share["warning"] for share in SHARES.values()]
    named = [word.strip(".,;:()") for text in texts for word in text.split() if "." in word.strip(".,;:()")]
    assert len(named) > 15
    assert [name for name in named if name not in keys | files] == []


@pytest.mark.parametrize(
    ("moved", "dtype", "passes"),
    [
        (off_by(), "fp32", True),
        (off_by(9e-5), "fp32", True),
        (off_by(2e-4), "fp32", False),  # one token is enough
        (off_by(*[9e-5] * 8), "fp32", True),
        (off_by(2e-4), "bf16", True),
        (off_by(0.15), "bf16", True),  # 0.019 in the mean
        (off_by(0.17), "bf16", False),
        (off_by(*[0.019] * 8), "bf16", True),
        (off_by(*[-0.021] * 8), "bf16", False),
        (off_by(float("nan")), "bf16", False),
        (off_by(float("nan")), "fp32", False),
    ],
)
def test_log_probs_agree_to_the_precisions_bound(moved: np.ndarray, dtype: str, passes: bool) -> None:
    assert compare("engine", moved, LOGPROBS, ALL, dtype).passed is passes


@pytest.mark.parametrize(
    ("off", "few"),
    [
        *(([], False), ([9e-5], False), ([2e-4], True), ([2e-4] * 2, True), ([2e-4] * 3, False), ([9e-4], True)),
        *(([2e-3], False), ([float("nan")], False)),
    ],
)
def test_a_few_tokens_a_little_beyond_the_bound_are_rounding(off: list[float], few: bool) -> None:
    theirs = np.zeros(200, dtype=np.float32)
    verdict = compare("engine", np.array([*off, *theirs[len(off) :]], np.float32), theirs, theirs == 0, "fp32")
    assert verdict.few is few
    nobody: object = None
    notes: list[str] = []
    with nullcontext() if few or verdict.passed else pytest.raises(SelfCheckError):
        SelfCheck(Config(), nobody, notes.append, PromptFindings({}), {}, nobody)._insist(verdict)  # type: ignore[arg-type]
    assert [note.startswith("warning: the log-probs of engine and actor ") for note in notes] == [True] * few
    assert not compare("engine", np.full(8, 2e-2, np.float32), theirs[:8], ALL, "bf16").few  # a bound on the mean


def test_only_the_policys_own_tokens_count() -> None:
    mask = ALL.copy()
    mask[0] = False
    assert compare("engine", off_by(5.0), LOGPROBS, mask, "fp32").figure == 0.0
    assert compare("engine", off_by(float("nan")), LOGPROBS, ~ALL, "fp32").passed


def test_the_engine_that_is_furthest_off_is_named() -> None:
    engines = np.array([0, 0, 1, 1, 2, 2, 2, 2], dtype=np.int32)
    moved = off_by(1e-6, 0, 0.5, 0)
    verdict = compare("engine", moved, LOGPROBS, ALL, "fp32", engines)
    assert "engine 1: 0.5, the others at most " in verdict.error()
    assert "engine 1: nan" in compare("engine", off_by(0, 0, float("nan")), LOGPROBS, ALL, "fp32", engines).error()
    assert "engine 0" not in compare("engine", moved, LOGPROBS, ALL, "fp32", np.zeros(8, np.int32)).error()


def test_an_error_says_check_figure_meaning_and_key() -> None:
    error = compare("reference", off_by(0.25), LOGPROBS, ALL, "fp32").error()
    assert error == (
        "self-check failed (reference): the log-probs of actor and reference, which are the same model before the "
        "first step, are 0.25 nats apart (largest of 8 tokens, 1 of them beyond; mean 0.031); at most 0.0001 can be "
        "rounding. Usually: one of the "
        "two was loaded in another precision, or computes with other kernels. What to change: look at ds.param_dtype, "
        "ds.zero_stage (0 computes 16 bits under autocast), ref.zero_stage and ds.attn_implementation. "
        "train.self_check = false leaves the self-check out."
    )


@pytest.mark.parametrize(
    ("ratio", "approx_kl", "dtype", "passes"),
    [
        (1.0, 0.0, "fp32", True),
        (1.0, -1e-14, "fp32", True),  # rounding
        (1.00005, 1e-10, "fp32", True),
        (1.0002, 2e-8, "fp32", False),
        (1.0, 0.005, "fp32", False),  # noise of 0.1 around 1
        (1.147, 0.05, "bf16", False),
        (1.01, 5e-5, "bf16", True),
        (1.0, 0.005, "bf16", False),
        (float("nan"), 0.0, "bf16", False),
        (1.0, float("nan"), "bf16", False),
    ],
)
def test_the_first_update_begins_at_ratio_one(ratio: float, approx_kl: float, dtype: str, passes: bool) -> None:
    verdict = first_ratio(ratio, approx_kl, dtype)
    assert verdict.passed is passes
    assert f"mean ratio {ratio:.6g}" in verdict.error()


@pytest.mark.parametrize(
    ("rewards", "group", "constant"),
    [
        (np.random.default_rng(0).normal(0, 3, 64), 4, 0.0),
        (np.ones(64), 4, 1.0),
        (np.repeat([0.0, 1.0, 0.0, 1.0], 4), 4, 1.0),
        (np.array([0.0, 1.0, 0.0, 0.0]), 2, 0.5),
        (np.array([0.0, 1.0, 0.0, 0.0]), 1, 0.0),  # without groups: the batch
        (np.zeros(4), 1, 1.0),
        (np.array([np.nan, 0.0]), 2, 0.0),
        (np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [2.0, 2.0]]), 2, 0.5),  # sums are equal, components are not
    ],
)
def test_share_of_groups_without_a_difference(rewards: np.ndarray, group: int, constant: float) -> None:
    assert constant_share(rewards.astype(np.float32), group) == constant


def test_rewards_that_are_no_numbers_are_an_error() -> None:
    assert not_finite(np.zeros(3, np.float32)) == ""
    error = not_finite(np.array([0.0, np.nan, np.inf], np.float32))
    assert "2 of 3 rewards are not finite, the first is nan for response 1" in error
    assert "reward.remote_url" in error


def a_batch(rewards: list[float]) -> tuple[list[Trajectory], Experience]:
    """Two responses of one token to each prompt; every second one was cut off."""
    ids, span = np.array([3], np.int32), [VersionSpan(0, 1, 0)]
    how = [(0, 1, ids, STOP, span), (1, 1, ids, LENGTH, span)]
    found = [response(row // 2, "", *how[row % 2]) for row in range(len(rewards))]
    exp = pack(found, rewards)
    exp.columns["logprobs"] = exp.columns["rollout_logprobs"]
    return found, exp


def test_shares_of_a_batch_are_metrics_of_every_step() -> None:
    config = Config()
    config.rollout.n_samples_per_prompt = 2
    found, exp = a_batch([1.0, 1.0, 0.0, 1.0, 5.0, 5.0, 0.0, 0.0])
    metrics = sample_metrics(config, found, Rewards(exp.rewards, None, {}), exp)
    assert (metrics["reward_constant"], metrics["truncated"]) == (0.75, 0.5)
    assert (metrics["reward_min"], metrics["reward_max"]) == (0.0, 5.0)
    assert metrics["reward_std"] == pytest.approx(1.996, abs=1e-3)
    assert agreement_metrics(config, found, exp, 0)["rollout_logprob_diff"] == 0.0


def test_metrics_of_a_step_say_what_failed_and_what_was_left_out() -> None:
    config = Config()
    config.rollout.repetition_detection_max_pattern_size, config.env.path = 5, "game.py"
    found, exp = a_batch([1.0, 0.0, 3.0, 0.0])
    found[1].finish_reason, found[3].finish_reason = REPETITION, LOST
    found[0].turns, found[0].counts, found[2].counts = 5, {CALLS: 6, RAISED: 1}, {CALLS: 2, UNKNOWN: 1, RAISED: 1}
    failed, scores = np.array(["", "late: 1", "", "late: 2"]), np.float32([1, 0, 0, 0])
    rewards = Rewards(exp.rewards, scores, {"x": np.float32([7])}, skipped=np.array([0, 0, 0, 1], bool), failed=failed)
    metrics = sample_metrics(config, found, rewards, exp)
    stated = {"repetition": 0.25, "truncated": 0.25, "lost": 0.25, "turns": 2.0, "tools/calls": 2.0}
    stated |= {"tools/raised": 0.25, "tools/unknown": 0.125, "tools/arguments": 0.0, "tools/unreadable": 0.0}
    stated |= {"accuracy": 0.25, "reward/skipped": 0.25, "reward/failed": 0.5, "reward/x": 7.0, "response_tokens": 4.0}
    assert metrics.items() >= stated.items()


def test_a_first_batch_with_a_reward_that_is_no_number_ends_the_run_behind_its_warnings() -> None:
    config, notes = Config(), []
    config.reward.remote_url = "reward.py"
    nobody: object = None
    check = SelfCheck(config, nobody, notes.append, PromptFindings({}), {}, nobody)  # type: ignore[arg-type]
    found, exp = a_batch([0.0, float("nan")])
    with pytest.raises(SelfCheckError, match="1 of 2 rewards are not finite, the first is nan for response 1"):
        check.before_update(1, found, exp, {"reward_constant": 0.9, "truncated": 0.9}, 0)
    assert [note.partition(" ")[0] for note in notes] == ["self-check,", "self-check,", "warning:", "warning:"]


def test_shares_above_their_limit_are_warned_of_and_others_reported() -> None:
    shares = {"reward_clipped": 0.051, "reward_constant": 0.8, "truncated": 0.005}
    assert shares_line("rewards", shares, REWARD_SHARES) == (
        "self-check, rewards: 5 % clipped, 80 % of the groups constant, under 1 % truncated"
    )
    assert warnings(shares, REWARD_SHARES) == []
    # Each step warns of clipped rewards by itself.
    assert warnings({"reward_clipped": 1.0, "truncated": 0.5}, REWARD_SHARES) == []
    (constant,) = warnings({**shares, "reward_constant": 0.81}, REWARD_SHARES)
    assert constant.startswith("warning: 81 % of the groups have one reward for all of their responses")
    assert len(warnings({"reward_constant": 0.9, "truncated": float("nan")}, REWARD_SHARES)) == 2
    (doubled,) = warnings({"prompts_double_bos": 0.004, "prompts_dropped": 0.1}, PROMPT_SHARES)
    assert doubled.startswith("warning: under 1 % of the prompts begin with two BOS tokens")


def test_a_line_has_the_figures_and_their_bound() -> None:
    verdicts = [compare(name, off_by(3e-5), LOGPROBS, ALL, "fp32") for name in ("engine", "reference")]
    assert agreement_line("sampled tokens", verdicts, {"engine": "engine", "reference": "reference"}) == (
        "self-check, sampled tokens: engine 3e-05, reference 3e-05 nats (largest; at most 0.0001)"
    )


def test_drift_is_warned_of_at_once_and_when_it_has_doubled_and_ends_the_run_at_the_multiple() -> None:
    config, notes = Config(), []
    config.ds.param_dtype, config.train.self_check_stop = "fp32", 5.0
    nobody: object = None
    check = SelfCheck(config, nobody, notes.append, PromptFindings({}), {}, nobody)  # type: ignore[arg-type]
    for step, mean in enumerate((1e-5, 1.5e-4, 1.6e-4, 2.9e-4, 3.1e-4, 4.9e-4), start=2):
        check._watch(step, drift(mean, "fp32"))
    assert [note.split(":")[1] for note in notes] == [" step 3", " step 6"]
    assert "vllm.dtype" in notes[0]
    with pytest.raises(SelfCheckError, match=r"step 8: .* 0\.0005 nats .* beyond 5 times the bound"):
        check._watch(8, drift(5e-4, "fp32"))
    with pytest.raises(SelfCheckError, match="nan nats"):
        check._watch(8, drift(float("nan"), "fp32"))
    config.train.self_check_stop, config.rollout.engine = 0.0, "hf"
    check._watch(9, drift(1.0, "fp32"))
    assert notes[-1].startswith("warning: step 9: ")
    assert "(with rollout.engine = hf: ds.param_dtype)" in notes[-1]
    config.ds.param_dtype = "bf16"
    count = len(notes)
    check._watch(10, drift(0.019, "bf16"))
    assert len(notes) == count

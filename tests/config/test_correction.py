"""The keys of algo.correction: which rule they choose, and one sentence for each contradiction."""

from __future__ import annotations

import pytest

from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule
from slurm_rlhf.config.correction import bypass_note, correction_of
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config


def config_of(*keys: str) -> Config:
    names = [key if "." in key.partition("=")[0] else f"algo.correction.{key}" for key in keys]
    return load_config(None, [f"--{name}" for name in names])


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ([], None),
        (["vllm.sync_mode=inflight"], PRESETS["tis"]),
        (["vllm.sync_mode=inflight", "preset=none"], None),
        (["vllm.sync_mode=inflight", "bypass=true"], None),
        (["vllm.sync_mode=inflight", "thresholds=0,3"], CorrectionRule("token", "truncate", 0, 3)),
        (["bypass=true", "preset=none"], None),
        (["preset=tis"], CorrectionRule("token", "truncate", 0, 2)),
        (["preset=icepop"], CorrectionRule("token", "mask", 0.5, 5)),
        (["preset=seq_mask"], CorrectionRule("geometric", "mask", 0.99, 1.01)),
        (["preset=icepop", "thresholds=0.9,1"], CorrectionRule("token", "mask", 0.9, 1)),
        (["level=token", "mode=clip", "thresholds=0.5,5"], CorrectionRule("token", "clip", 0.5, 5)),
        (["level=sequence", "mode=mask", "thresholds=0,3"], CorrectionRule("sequence", "mask", 0, 3)),
        (["level=geometric", "mode=truncate", "thresholds=0,1.5"], CorrectionRule("geometric", "truncate", 0, 1.5)),
    ],
)
def test_the_rule_that_keys_choose(keys: list[str], rule: CorrectionRule | None) -> None:
    config = config_of(*keys)
    assert correction_of(config) == rule
    assert [told for told in rule_problems(config) if "correction" in told] == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["preset=icepop", "thresholds=5,0.5"], ["[5.0, 0.5] are the wrong way round"]),
        (["preset=icepop", "thresholds=1,1"], ["wrong way round, or equal"]),
        (["preset=icepop", "thresholds=-0.5,5"], ["thresholds must be at least 0, got -0.5"]),
        (["preset=icepop", "thresholds=1.5,5"], ["[1.5, 5.0] leave out 1", "every token", "low <= 1 <= high"]),
        (["preset=seq_mask", "thresholds=0.2,0.9"], ["[0.2, 0.9] leave out 1"]),
        (["preset=icepop", "thresholds=2"], ["[2.0] takes two numbers"]),
        (["preset=tis", "thresholds=0.5,5"], ["algo.correction.preset = tis", "use [0, 5]", "mode = clip"]),
        (
            ["level=sequence", "mode=truncate", "thresholds=0.5,5"],
            ["algo.correction.mode = truncate does not apply", "algo.correction.level = sequence with"],
        ),
        (["level=token"], ["level = token says half of a correction: set algo.correction.mode"]),
        (["mode=mask", "thresholds=0.5,5"], ["mode = mask says half of a correction: set algo.correction.level"]),
        (["level=token", "mode=mask"], ["level = token with algo.correction.mode = mask needs algo.correction.thresh"]),
        (
            ["preset=tis", "level=token", "mode=mask", "thresholds=0.5,5"],
            ["algo.correction.level = token and algo.correction.preset = tis are two corrections"],
        ),
        (["preset=none", "mode=mask"], ["algo.correction.mode = mask and algo.correction.preset = none are two"]),
        (
            ["thresholds=0.5,5"],
            ["have no effect with algo.correction.preset = auto, which is none with vllm.sync_mode"],
        ),
        (
            ["vllm.sync_mode=inflight", "preset=none", "thresholds=0,2"],
            ["have no effect with algo.correction.preset = none: choose tis, icepop or seq_mask"],
        ),
        (["off_policy_delta=-0.1"], ["off_policy_delta must be at least 0, got -0.1"]),
        (["bypass=true", "preset=tis"], ["algo.correction.bypass = true", "algo.correction.preset = tis to bound"]),
        (
            ["bypass=true", "level=token", "mode=clip", "thresholds=0.5,5"],
            ["leaves none for algo.correction.level = token and algo.correction.mode = clip and algo.correction.t"],
        ),
        (
            ["bypass=true", "off_policy_delta=0.1"],
            ["leaves none for algo.correction.off_policy_delta = 0.1 to compare"],
        ),
    ],
)
def test_one_sentence_says_what_is_wrong(keys: list[str], told: list[str]) -> None:
    (problem,) = [found for found in rule_problems(config_of(*keys)) if "correction" in found]
    for words in told:
        assert words in problem
    assert ". " not in problem


def test_top_p_is_refused_with_a_correction_too() -> None:
    """A correction would take what top-p cut off for a disagreement of engine and actor."""
    for keys in (["preset=tis"], ["bypass=true"], ["vllm.sync_mode=inflight"], ["off_policy_delta=0.1"]):
        (problem,) = [found for found in rule_problems(config_of(*keys, "rollout.top_p=0.9")) if "top_p" in found]
        assert "rollout.top_p = 0.9 would make the engine sample from a part of the vocabulary" in problem
        assert "wrong ratios (algo.correction.* does not mend that: its ratios would be the wrong ones)" in problem
    (problem,) = [found for found in rule_problems(config_of("rollout.top_p=0.9")) if "top_p" in found]
    assert "algo.correction" not in problem


def test_bypass_says_what_it_means_for_a_run_that_is_to_be_the_same_bit_for_bit() -> None:
    config = config_of("bypass=true", "train.full_determinism=true")
    assert [told for told in rule_problems(config) if "bypass" in told or "full_determinism" in told] == []
    note = bypass_note(config)
    assert "algo.correction.bypass with train.full_determinism: the old log-probs are the engines'" in note
    assert "only with the same engines (vllm.num_engines, " in note
    assert bypass_note(config_of("bypass=true")) == bypass_note(config_of("train.full_determinism=true")) == ""

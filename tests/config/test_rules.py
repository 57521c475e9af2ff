"""Rules on keys: those that choose the correction, exclude each other, have no effect or limit models and engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.model_directory import check_architecture
from slurm_rlhf.config.rules import _divisors, correction_of, rule_problems, unused_note
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError

# --- correction -------------------------------------------------------------------------------------------------------


def corrected(*keys: str) -> Config:
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
    config = corrected(*keys)
    assert correction_of(config) == rule
    assert [stated for stated in rule_problems(config) if "correction" in stated] == []


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        ("ds.packing_samples=always ds.attn_implementation=eager", "has a row for each"),
        ("ds.packing_samples=always ds.attn_implementation=flex_attention", "has a row for each"),
        ("ds.attn_implementation=flash_attention_3 ds.param_dtype=fp32", "computes in 16 bits only"),
        ("lora.target_modules=[] lora.rank=8", "gives no layer an adapter"),
        ("vllm.keep_kv_cache=true train.full_determinism=true", "excludes that: leave one of the two out"),
        ("vllm.keep_kv_cache=true train.full_determinism=true vllm.sync_mode=inflight", "excludes that: leave one"),
    ],
)
def test_keys_that_exclude_each_other_are_one_error_with_their_names(words: str, stated: str) -> None:
    (found,) = rule_problems(load_config(None, [f"--{word}" for word in words.split()]))
    assert stated in found
    assert [word for word in words.split() if word.partition("=")[0] not in found] == []


# --- engine rules -----------------------------------------------------------------------------------------------------


def test_divisors_are_looked_for_as_long_as_a_user_waits() -> None:
    """The product of two primes above a million has more than are found."""
    assert _divisors(12) == [1, 2, 3, 4, 6, 12]
    assert _divisors(1_000_003 * 1_000_033) == [1, 1_000_003 * 1_000_033]


def test_keys_without_effect_are_reported() -> None:
    assert unused_note(corrected("rollout.engine=hf")) == unused_note(corrected("vllm.max_num_seqs=16")) == ""
    stated = unused_note(corrected("rollout.engine=hf", "vllm.max_num_seqs=16", "sync.bucket_mb=8"))
    assert "vllm.max_num_seqs, sync.bucket_mb have no effect" in stated


def test_models_that_are_refused_because_of_engines_are_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ApertusForCausalLM"], "model_type": "apertus"}')
    check_architecture("actor", str(tmp_path), engines=False)
    with pytest.raises(ModelError, match="ApertusForCausalLM"):
        check_architecture("actor", str(tmp_path))


def test_the_quickstart_may_be_run_with_it() -> None:
    root = Path(__file__).parents[2]
    loaded = load_config([root / "sbatch" / "quickstart.toml"], ["--rollout.engine=hf"])
    assert list(rule_problems(loaded)) == []

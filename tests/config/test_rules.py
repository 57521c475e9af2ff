"""Rules over keys: pairs that contradict each other, the correction, the engine, and the policy loss."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.algorithms import registry
from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES
from slurm_rlhf.algorithms.registry import PRESETS, Algorithm, CorrectionRule, built_in, register_algorithm
from slurm_rlhf.config.correction import bypass_note, correction_of
from slurm_rlhf.config.keys import all_keys, put
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.model_directory import check_architecture
from slurm_rlhf.config.roles import ROLLOUT, running_roles
from slurm_rlhf.config.rules import EngineRules, rule_problems, unused_note
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, ModelError

GROUPS = ("rollout.n_samples_per_prompt=4", "rollout.batch_size=32")
"""As many responses as by default, in groups."""

PAIRS = [
    # advantages
    *(
        (f"algo.advantage.estimator={name}", "rollout.n_samples_per_prompt=1")
        for name in ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo", "max_rl", "gdpo")
    ),
    ("algo.advantage.estimator=reinforce", "critic.freezing_steps=3"),
    ("algo.advantage.estimator=reinforce", "algo.advantage.lambd_critic=0.5"),
    ("algo.advantage.estimator=rloo", "algo.advantage.no_std_norm=true", *GROUPS),
    ("algo.advantage.no_whitening=true", "algo.advantage.no_std_norm=true"),
    *(
        ("algo.advantage.no_whitening=true", f"algo.advantage.estimator={name}", *GROUPS)
        for name in ("rloo", "group_norm", "dr_grpo")
    ),
    ("algo.advantage.estimator=group_norm", "algo.advantage.gdpo_reward_weights=1,2", *GROUPS),
    ("algo.advantage.estimator=gdpo", "reward.model_name_or_path=/model", *GROUPS),
    ("algo.advantage.estimator=gdpo", "reward.normalize_enable=true", *GROUPS),
    # penalties, truncated responses, repetition
    ("reward.overlong_buffer_len=1025", "rollout.max_new_tokens=1024"),
    ("reward.overlong_penalty_factor=2", "reward.overlong_buffer_len=0"),
    ("reward.length_penalty_coef=0.1", "rollout.n_samples_per_prompt=1"),
    ("reward.stop_properly_penalty_coef=0.5", "rollout.mask_truncated=true"),
    ("reward.stop_properly_penalty_coef=0.5", "reward.normalize_enable=true"),
    ("reward.overlong_buffer_len=9", "algo.advantage.estimator=gdpo", *GROUPS),
    ("reward.length_penalty_coef=0.1", "algo.advantage.estimator=max_rl", *GROUPS),
    ("rollout.repetition_detection_min_pattern_size=5", "rollout.repetition_detection_max_pattern_size=4"),
    # policy losses
    ("actor.eps_clip=0.3", "actor.eps_clip_low_high=0.2,0.28"),
    ("actor.policy_loss_type=gspo", "actor.eps_clip=0.3", "actor.eps_clip_low_high=0.0003,0.0004"),
    ("actor.policy_loss_type=gspo", "algo.advantage.estimator=dr_grpo", *GROUPS),
    # KL
    ("algo.kl.target=6", "algo.kl.init_coef=0"),
    ("algo.kl.horizon=500", "algo.kl.target=0"),
    ("algo.kl.use_loss=true", "algo.kl.init_coef=0", "algo.kl.estimator=k2"),
    ("algo.kl.use_loss=true", "algo.kl.estimator=k1"),
    # correction
    ("algo.correction.bypass=true", "actor.old_logprobs=pass"),
    ("rollout.top_p=0.9", "algo.correction.", "algo.correction.preset=tis"),
    # dynamic sampling and sampling ahead
    ("algo.dynamic_filtering_enable=true", "rollout.n_samples_per_prompt=1"),
    ("algo.dynamic_filtering_enable=true", "reward.model_name_or_path=/model", *GROUPS),
    ("algo.dynamic_filtering_enable=true", "algo.advantage.estimator=gdpo", GROUPS[0]),
    *(
        ("algo.dynamic_filtering_enable=false", word)
        for word in (
            "rollout.vllm_generate_batch_size=256",
            "algo.dynamic_filtering_range=0.1,0.9",
            "algo.dynamic_filtering_max_tries=3",
        )
    ),
    ("rollout.vllm_generate_batch_size=8", "rollout.batch_size=32", "algo.dynamic_filtering_enable=true", GROUPS[0]),
    (
        "rollout.vllm_generate_batch_size=64",
        "vllm.sync_mode=inflight",
        "algo.dynamic_filtering_enable=true",
        *GROUPS,
    ),
    ("train.full_determinism=true", "vllm.sync_mode=inflight"),
    ("train.async_queue_size=2", "vllm.sync_mode=drain"),
    ("train.staleness_threshold=0.2", "vllm.sync_mode=drain"),
    ("rollout.top_p=0.9", "rollout.temperature=0.7"),
    # precision
    ("vllm.dtype=bf16", "ds.param_dtype=fp32"),
    ("vllm.dtype=bf16", "ds.param_dtype=fp16"),
    ("vllm.dtype=fp16", "ds.param_dtype=bf16"),
    ("ds.grad_comm_dtype=bf16", "ds.param_dtype=fp16"),
    *((f"ds.{name}", "ds.param_dtype=bf16") for name in ("loss_scale_window=9", "min_loss_scale=2")),
    ("ds.initial_scale_power=9", "ds.param_dtype=fp32"),
    ("ds.min_loss_scale=64", "ds.initial_scale_power=5", "ds.param_dtype=fp16"),
]


def problems(*words: str) -> list[str]:
    return list(rule_problems(load_config(None, [f"--{word}" for word in words])))


def key(word: str) -> str:
    return word.partition("=")[0]


def test_the_configurations_that_the_pairs_change_are_good() -> None:
    assert problems() == problems(*GROUPS) == problems("ds.param_dtype=fp16", "ds.fp32_lm_head=true") == []


@pytest.mark.parametrize(
    "words",
    [
        ("actor.eps_clip=0.2", "actor.eps_clip_low_high=0.2,0.28"),  # as verl writes all three
        ("algo.kl.target=6", "algo.kl.horizon=500"),
        ("algo.advantage.no_whitening=true",),
        ("algo.dynamic_filtering_enable=true", "algo.dynamic_filtering_range=0.1,0.9", *GROUPS),
    ],
    ids=str,
)
def test_keys_that_go_together_are_no_contradiction(words: tuple[str, ...]) -> None:
    assert problems(*words) == []


@pytest.mark.parametrize("words", PAIRS, ids=lambda words: f"{words[0]} {words[1]}")
def test_a_contradiction_is_one_sentence_that_names_both_keys(words: tuple[str, ...]) -> None:
    found = problems(*(word for word in words if "=" in word))
    assert len(found) == 1, found
    assert key(words[0]) in found[0]
    assert key(words[1]) in found[0]


@pytest.mark.parametrize("estimator", sorted(built_in()))
def test_every_estimator_goes_with_every_loss_or_says_with_which_key_it_would(estimator: str) -> None:
    losses, modes = (all_keys()[f"actor.{name}"].choices for name in ("policy_loss_type", "loss_agg_mode"))
    assert len(losses) >= 5
    assert len(modes) >= 5
    for loss, mode, sync in itertools.product(losses, modes, all_keys()["vllm.sync_mode"].choices):
        words = [f"algo.advantage.estimator={estimator}", f"actor.policy_loss_type={loss}", f"vllm.sync_mode={sync}"]
        found = problems(*words, f"actor.loss_agg_mode={mode}", *GROUPS)
        assert len(found) <= 1, (loss, mode, found)
        if found:
            assert mode == ""
            assert all(name in found[0] for name in (*map(key, words[:2]), "actor.loss_agg_mode"))


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
    (problem,) = [found for found in rule_problems(corrected(*keys)) if "correction" in found]
    for words in told:
        assert words in problem
    assert ". " not in problem


def test_top_p_is_refused_with_a_correction_too() -> None:
    """A correction would take what top-p cut off for a disagreement of engine and actor."""
    for keys in (["preset=tis"], ["bypass=true"], ["vllm.sync_mode=inflight"], ["off_policy_delta=0.1"]):
        (problem,) = [found for found in rule_problems(corrected(*keys, "rollout.top_p=0.9")) if "top_p" in found]
        assert "rollout.top_p = 0.9 would make the engine sample from a part of the vocabulary" in problem
        assert "wrong ratios (algo.correction.* does not mend that: its ratios would be the wrong ones)" in problem
    (problem,) = [found for found in rule_problems(corrected("rollout.top_p=0.9")) if "top_p" in found]
    assert "algo.correction" not in problem


def test_bypass_says_what_it_means_for_a_run_that_is_to_be_the_same_bit_for_bit() -> None:
    config = corrected("bypass=true", "train.full_determinism=true")
    assert [told for told in rule_problems(config) if "bypass" in told or "full_determinism" in told] == []
    note = bypass_note(config)
    assert "algo.correction.bypass with train.full_determinism: the old log-probs are the engines'" in note
    assert "only with the same engines (vllm.num_engines, " in note
    assert bypass_note(corrected("bypass=true")) == bypass_note(corrected("train.full_determinism=true")) == ""


# --- engine rules -----------------------------------------------------------------------------------------------------


def hf_config(**keys: Any) -> Config:
    made = Config()
    for name, value in {"rollout.engine": "hf", **keys}.items():
        put(made, name, value)
    return made


def test_the_actor_samples_alone() -> None:
    assert ROLLOUT not in [role.name for role in running_roles(hf_config())]
    assert ROLLOUT in [role.name for role in running_roles(Config())]
    assert list(rule_problems(hf_config())) == []
    assert list(rule_problems(hf_config(**{"train.colocate_all": True}))) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"vllm.sync_mode": "inflight"}, ("vllm.sync_mode = inflight", "rollout.engine = vllm")),
        ({"vllm.tensor_parallel_size": 2}, ("vllm.tensor_parallel_size = 2", "ds.zero_stage = 3")),
        ({"vllm.dtype": "fp32"}, ("vllm.dtype = fp32", "ds.param_dtype = bf16")),
        ({"ds.enable_sleep": True, "train.colocate_all": True}, ("ds.enable_sleep", "leave the key out")),
        ({"eval.overlap": True, "eval.dataset": "e.jsonl"}, ("eval.overlap", "leave the key out")),
        ({"rollout.hf_gather": "layer"}, ("rollout.hf_gather = layer", "ds.zero_stage = 3")),
        ({"rollout.engine": "vllm", "rollout.hf_max_num_seqs": 8}, ("rollout.hf_max_num_seqs = 8", "= vllm")),
    ],
)
def test_what_it_excludes_is_one_sentence_that_names_the_key(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    (problem,) = EngineRules(hf_config(**keys)).problems()
    assert all(word in problem for word in words)
    assert problem in list(rule_problems(hf_config(**keys)))


def test_keys_without_effect_are_told() -> None:
    assert unused_note(hf_config()) == ""
    assert unused_note(hf_config(**{"rollout.engine": "vllm", "vllm.max_num_seqs": 16})) == ""
    told = unused_note(hf_config(**{"vllm.max_num_seqs": 16, "sync.bucket_mb": 8}))
    assert "vllm.max_num_seqs, sync.bucket_mb have no effect" in told


def test_models_that_are_refused_because_of_engines_are_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ApertusForCausalLM"], "model_type": "apertus"}')
    check_architecture("actor", str(tmp_path), engines=False)
    with pytest.raises(ModelError, match="ApertusForCausalLM"):
        check_architecture("actor", str(tmp_path))


def test_the_quickstart_may_be_run_with_it() -> None:
    from slurm_rlhf.config.load import load_config

    root = Path(__file__).parents[2]
    loaded = load_config([root / "sbatch" / "quickstart.toml"], ["--rollout.engine=hf"])
    assert list(rule_problems(loaded)) == []


# --- loss rules -------------------------------------------------------------------------------------------------------


GROUP = ("--algo.advantage.estimator=group_norm", "--rollout.n_samples_per_prompt=4")


def actor_problems(*words: str) -> list[str]:
    return list(rule_problems(load_config(None, [word if word[0] == "-" else f"--actor.{word}" for word in words])))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_runs_with_what_it_is_used_with(name: str) -> None:
    assert actor_problems(f"policy_loss_type={name}", *GROUP) == []


def test_keys_of_a_loss_go_with_it() -> None:
    assert actor_problems("policy_loss_type=ppo", "dual_clip=3", "eps_clip=0.1") == []
    assert actor_problems("policy_loss_type=gspo", "dual_clip=3", "eps_clip_low_high=[0.001, 0.002]") == []
    assert (
        actor_problems("policy_loss_type=cispo", "eps_clip_low_high=[1, 0.28]", "loss_agg_mode=seq-mean-token-sum")
        == []
    )
    assert actor_problems("policy_loss_type=sapo", "sapo_temperature_pos=2", "sapo_temperature_neg=2.1") == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["dual_clip=1"],
            "actor.dual_clip = 1 would cut off tokens that did not become likelier: it bounds a ratio",
        ),
        (["dual_clip=0.5"], "actor.dual_clip = 0.5 would cut off"),
        (["dual_clip=-1"], "actor.dual_clip must be at least 0, got -1"),
        (
            ["eps_clip_low_high=[0.28, 0.2]"],
            "= 0.28 0.2 is the wrong way round: the range below comes first and is",
        ),
        (["policy_loss_type=gspo", "eps_clip_low_high=[4e-4, 3e-4]"], "= 0.0004 0.0003 is the wrong way round"),
        (["eps_clip_low_high=[0.2]"], "actor.eps_clip_low_high takes two numbers or none, got [0.2]"),
        (["eps_clip_low_high=[0, 0.2]"], "actor.eps_clip_low_high must be above 0, got 0.0"),
        (["sapo_temperature_pos=0"], "actor.sapo_temperature_pos must be above 0, got 0.0"),
        (
            ["policy_loss_type=gspo", "eps_clip=0.1"],
            "actor.eps_clip = 0.1 has no effect with actor.policy_loss_type = gspo, it belongs to ppo: leave it out, "
            "set actor.eps_clip_low_high for its range",
        ),
        (
            ["policy_loss_type=sapo", "eps_clip_low_high=[0.2, 0.28]"],
            "actor.eps_clip_low_high = [0.2, 0.28] has no effect with actor.policy_loss_type = sapo, it belongs to ppo "
            "and gspo and cispo and dppo_tv: leave it out",
        ),
        (
            ["policy_loss_type=cispo", "dual_clip=3"],
            "actor.dual_clip = 3 has no effect with actor.policy_loss_type = cispo, it belongs to ppo and gspo",
        ),
        (
            ["sapo_temperature_neg=2"],
            "actor.sapo_temperature_neg = 2 has no effect with actor.policy_loss_type",
        ),
    ],
)
def test_broken_rules(words: list[str], told: str) -> None:
    found = actor_problems(*words)
    assert len(found) == 1
    assert told in found[0]


def test_kl_as_a_term_of_the_loss_needs_a_weight_and_an_estimator_with_a_gradient() -> None:
    for estimator in ("k2", "k3", "k3+"):
        assert actor_problems("--algo.kl.use_loss=true", f"--algo.kl.estimator={estimator}", "nll_coef=0.1") == []
    assert actor_problems("--algo.kl.estimator=k3+") == []
    assert actor_problems("--algo.kl.use_loss=true") == [
        "algo.kl.use_loss = true with algo.kl.estimator = k1 would add noise alone, because the mean gradient of k1 is "
        "zero: set algo.kl.estimator to k2 or k3+, whose gradient is that of the KL divergence, or to k3"
    ]
    assert actor_problems("--algo.kl.use_loss=true", "--algo.kl.estimator=k2", "--algo.kl.init_coef=0") == [
        "algo.kl.use_loss = true adds a KL term of weight algo.kl.init_coef = 0, and no reference is started: set "
        "algo.kl.init_coef above 0, or leave use_loss out"
    ]


def test_two_aggregations_are_one_too_many() -> None:
    words = ["--algo.advantage.estimator=dr_grpo", "--rollout.n_samples_per_prompt=4", "policy_loss_type=gspo"]
    assert actor_problems(*words) == [
        "algo.advantage.estimator = dr_grpo adds up losses by seq-mean-token-sum-norm and actor.policy_loss_type = "
        "gspo by seq-mean-token-mean: say which with actor.loss_agg_mode"
    ]
    assert actor_problems(*words, "loss_agg_mode=seq-mean-token-mean") == []
    assert actor_problems(*words[:2], "policy_loss_type=cispo") == []


def test_a_loss_of_the_algorithms_own_excludes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_algorithm(Algorithm("mine", lambda inputs: None, policy_loss=lambda inputs: None))  # type: ignore[arg-type, return-value]
    assert (
        actor_problems("--algo.advantage.estimator=mine", "sapo_temperature_pos=2") == []
    )  # it may look at any of them
    assert actor_problems("--algo.advantage.estimator=mine", "policy_loss_type=cispo") == [
        "algo.advantage.estimator = mine brings a policy loss of its own, which actor.policy_loss_type = cispo would "
        "replace: leave actor.policy_loss_type out, or choose an algorithm without one"
    ]


def test_unknown_names_are_told_with_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy_loss_type takes one of ppo, gspo, cispo, sapo, dppo_tv"):
        load_config(None, ["--actor.policy_loss_type=grpo"])
    with pytest.raises(ConfigError, match='loss_agg_mode takes one of "", token-mean, seq-mean-token-mean, '):
        load_config(None, ["--actor.loss_agg_mode=mean"])
    file = tmp_path / "run.toml"
    file.write_text('[actor]\nloss_agg_mode = ""\npolicy_loss_type = "gspo"\n')
    assert load_config(file).actor.policy_loss_type == "gspo"
    assert load_config(None, ["--actor.loss_agg_mode="]).actor.loss_agg_mode == Config().actor.loss_agg_mode

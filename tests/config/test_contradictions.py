"""Keys that contradict each other: a pair gives exactly one sentence, which names both keys."""

from __future__ import annotations

import itertools

import pytest

from slurm_rlhf.algorithms.registry import built_in
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.rules import rule_problems

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

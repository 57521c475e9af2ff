"""Rules over the keys of the policy loss, its range and its aggregation."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.algorithms import registry
from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES
from slurm_rlhf.algorithms.registry import Algorithm, register_algorithm
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

GROUP = ("--algo.advantage.estimator=group_norm", "--rollout.n_samples_per_prompt=4")


def problems(*words: str) -> list[str]:
    return list(rule_problems(load_config(None, [word if word[0] == "-" else f"--actor.{word}" for word in words])))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_runs_with_what_it_is_used_with(name: str) -> None:
    assert problems(f"policy_loss_type={name}", *GROUP) == []


def test_keys_of_a_loss_go_with_it() -> None:
    assert problems("policy_loss_type=ppo", "dual_clip=3", "eps_clip=0.1") == []
    assert problems("policy_loss_type=gspo", "dual_clip=3", "eps_clip_low_high=[0.001, 0.002]") == []
    assert problems("policy_loss_type=cispo", "eps_clip_low_high=[1, 0.28]", "loss_agg_mode=seq-mean-token-sum") == []
    assert problems("policy_loss_type=sapo", "sapo_temperature_pos=2", "sapo_temperature_neg=2.1") == []


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
    found = problems(*words)
    assert len(found) == 1
    assert told in found[0]


def test_kl_as_a_term_of_the_loss_needs_a_weight_and_an_estimator_with_a_gradient() -> None:
    for estimator in ("k2", "k3", "k3+"):
        assert problems("--algo.kl.use_loss=true", f"--algo.kl.estimator={estimator}", "nll_coef=0.1") == []
    assert problems("--algo.kl.estimator=k3+") == []
    assert problems("--algo.kl.use_loss=true") == [
        "algo.kl.use_loss = true with algo.kl.estimator = k1 would add noise alone, because the mean gradient of k1 is "
        "zero: set algo.kl.estimator to k2 or k3+, whose gradient is that of the KL divergence, or to k3"
    ]
    assert problems("--algo.kl.use_loss=true", "--algo.kl.estimator=k2", "--algo.kl.init_coef=0") == [
        "algo.kl.use_loss = true adds a KL term of weight algo.kl.init_coef = 0, and no reference is started: set "
        "algo.kl.init_coef above 0, or leave use_loss out"
    ]


def test_two_aggregations_are_one_too_many() -> None:
    words = ["--algo.advantage.estimator=dr_grpo", "--rollout.n_samples_per_prompt=4", "policy_loss_type=gspo"]
    assert problems(*words) == [
        "algo.advantage.estimator = dr_grpo adds up losses by seq-mean-token-sum-norm and actor.policy_loss_type = "
        "gspo by seq-mean-token-mean: say which with actor.loss_agg_mode"
    ]
    assert problems(*words, "loss_agg_mode=seq-mean-token-mean") == []
    assert problems(*words[:2], "policy_loss_type=cispo") == []


def test_a_loss_of_the_algorithms_own_excludes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_algorithm(Algorithm("mine", lambda inputs: None, policy_loss=lambda inputs: None))  # type: ignore[arg-type, return-value]
    assert problems("--algo.advantage.estimator=mine", "sapo_temperature_pos=2") == []  # it may look at any of them
    assert problems("--algo.advantage.estimator=mine", "policy_loss_type=cispo") == [
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

"""A teacher in the reference's place: its advantages, its rules, and what is checked of its directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_tiny

from slurm_rlhf.algorithms.registry import find_algorithm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.roles import REFERENCE, ROLES, actor_is_reference, running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, ModelError
from slurm_rlhf.records import Experience
from slurm_rlhf.rewards.scored import Rewards
from slurm_rlhf.rewards.sources import reward_source
from slurm_rlhf.run.experience import fill_advantages


def taught(coef: float = 1.0) -> Config:
    config = Config()
    config.algo.advantage.estimator, config.rollout.n_samples_per_prompt = "group_norm", 2
    config.algo.kl.init_coef, config.algo.distill.coef = 0.0, coef
    config.algo.distill.model_name_or_path = "teacher"
    return config


@pytest.mark.parametrize(("coef", "rewards"), [(1.0, [0.0, 0.0]), (0.25, [3.0, 1.0])])
def test_a_token_gets_the_log_ratio_of_teacher_and_policy_on_top(coef: float, rewards: list[float]) -> None:
    lengths, logprobs, teacher = [2, 3], [-1.0, -0.5, -2.0, -0.1, -3.0], [-0.5, -0.7, -2.0, -4.0, -1.0]
    mask = [True, True, True, False, True]
    batch = Experience(
        np.ones(2, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        np.zeros(7, dtype=np.int32),
        np.array(mask),
        np.array(rewards, dtype=np.float32),
        {"logprobs": np.array(logprobs, dtype=np.float32), "ref_logprobs": np.array(teacher, dtype=np.float32)},
    )
    metrics = fill_advantages(taught(coef), find_algorithm("group_norm"), batch, Rewards(batch.rewards), 0.0, None)
    std = np.std(rewards, ddof=1)
    of_reward = [(reward - np.mean(rewards)) / (std + 1e-6) if std else 0.0 for reward in rewards]
    gaps = np.subtract(teacher, logprobs)
    wanted = [(of_reward[i >= 2] + coef * gaps[i]) if mask[i] else 0.0 for i in range(5)]
    np.testing.assert_allclose(batch.columns["advantages"], wanted, rtol=1e-6)
    assert metrics["teacher_gap"] == pytest.approx(gaps[mask].mean(), rel=1e-6)


def test_a_teacher_runs_as_the_reference_also_with_adapters() -> None:
    config = taught()
    config.lora.rank = 4
    assert REFERENCE in {role.name for role in running_roles(config)}
    assert ROLES[REFERENCE].model(config) == ("algo.distill.model_name_or_path", "teacher")
    assert not actor_is_reference(config)
    assert reward_source(config)([], [], 0).rewards.tolist() == []


def test_keys_that_contradict_a_teacher() -> None:
    config = taught()
    config.rollout.batch_size = 64
    assert list(rule_problems(config)) == []
    config.algo.kl.init_coef = 0.01
    assert any("algo.kl.init_coef = 0.01 would penalise the distance" in problem for problem in rule_problems(config))
    config = Config()
    config.algo.distill.coef = 2.0
    assert any("algo.distill.coef = 2 has no effect without" in problem for problem in rule_problems(config))


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    config = taught()
    config.rollout.batch_size, config.run_dir = 64, str(tmp_path / "run")
    config.actor.model_name_or_path = str(make_tiny(tmp_path / "model"))
    config.algo.distill.model_name_or_path = str(make_tiny(tmp_path / "teacher", hidden=128))
    config.data.prompt_dataset = str(tmp_path / "prompts.jsonl")
    config.data.max_len, config.rollout.max_new_tokens = 64, 8
    (tmp_path / "prompts.jsonl").write_text('{"input": "1"}\n')
    check(config)  # and no reward is missed
    file = tmp_path / "teacher" / "tokenizer.json"
    table = json.loads(file.read_text())
    vocab = table["model"]["vocab"]
    vocab["7"], vocab["8"] = vocab["8"], vocab["7"]
    file.write_text(json.dumps(table))
    with pytest.raises(ModelError, match=r"algo\.distill\.model_name_or_path: .* has another tokenizer .*token '7' is"):
        check(config)
    config.algo.distill.model_name_or_path = ""
    with pytest.raises(ConfigError, match=r"is set: name one, or a teacher \(algo\.distill\)"):
        check(config)

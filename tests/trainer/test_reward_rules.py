"""A reward model by the rule of its trainer: the token whose score counts, and the critic that starts from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from packed_rows import edit_config
from tiny_models import make_reward, make_tiny

from slurm_rlhf.algorithms.reward_shaping import normalized
from slurm_rlhf.config.check import check
from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Experience
from slurm_rlhf.trainer.batch import collate
from slurm_rlhf.trainer.frozen import RewardModel, pooling
from slurm_rlhf.trainer.models import load_critic, load_reward

EOS = 1
SEQUENCES = ([5, 9, 20, EOS], [7, 8, 9, 10, 11, 12, EOS], [30, 31, 32], [4, EOS, EOS])
FP32 = Ds(param_dtype="fp32")


def experience() -> Experience:
    lengths = np.array([len(ids) for ids in SEQUENCES], dtype=np.int32)
    tokens = np.concatenate([np.array(ids, dtype=np.int32) for ids in SEQUENCES])
    ones = np.ones(len(SEQUENCES), dtype=np.int32)
    actions = int((lengths - 1).sum())
    return Experience(ones, lengths - ones, tokens, np.ones(actions, np.bool_), np.zeros(len(SEQUENCES), np.float32))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reward models whose padding token is the end-of-sequence token, by three trainers; and a policy."""
    root = tmp_path_factory.mktemp("models")
    for head in ("score", "value_head", "v_head.summary"):
        edit_config(make_reward(root / head, head), pad_token_id=EOS)
    edit_config(make_reward(root / "openrlhf"), pad_token_id=EOS, value_head_prefix="score", mean=0.5, std=2.0)
    make_tiny(root / "policy")
    return root


def config_of(models: Path, name: str, **reward: object) -> Config:
    config = Config(ds=FP32)
    config.actor.model_name_or_path = str(models / "policy")
    config.reward.model_name_or_path = str(models / name)
    for key, value in reward.items():
        setattr(config.reward, key, value)
    return config


def scores(config: Config) -> tuple[list[float], str]:
    model = RewardModel(config)
    return model.score(experience(), [[3, 0], [2, 1]]).tolist(), model.description


def by_transformers(path: Path) -> tuple[list[float], list[float]]:
    """(as transformers' own class answers, scores of each sequence's last token)."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    own, last = [], []
    for ids in SEQUENCES:
        batch = torch.tensor([ids])
        with torch.no_grad():
            own.append(float(model(input_ids=batch).logits[0, 0]))
            last.append(float(model.score(model.model(input_ids=batch).last_hidden_state)[0, -1, 0]))
    return own, last


def test_the_token_that_counts_is_that_of_whoever_trained_the_model(models: Path) -> None:
    own, last = by_transformers(models / "score")
    assert abs(own[0] - last[0]) > 1e-2  # it matters
    assert own[2] == last[2]
    found, stated = scores(config_of(models, "score"))
    assert found == pytest.approx(own, abs=1e-5)
    assert stated.endswith("its last token that is not the padding token (transformers' rule for score.weight)")
    found, stated = scores(config_of(models, "value_head"))
    assert found == pytest.approx(last, abs=1e-5)
    assert stated.endswith("its last token (the rule of OpenRLHF and TRL for value_head.weight)")
    assert scores(config_of(models, "v_head.summary"))[0] == pytest.approx([score + 0.25 for score in last], abs=1e-5)
    found, stated = scores(config_of(models, "openrlhf"))
    assert found == pytest.approx(last, abs=1e-5)
    assert "OpenRLHF's rule: config.json has value_head_prefix" in stated


def test_the_key_decides_where_it_is_set(models: Path) -> None:
    own, last = by_transformers(models / "score")
    assert scores(config_of(models, "score", pooling="last"))[0] == pytest.approx(last, abs=1e-5)
    assert scores(config_of(models, "value_head", pooling="last_not_pad"))[0] == pytest.approx(own, abs=1e-5)
    assert pooling("last", "score", {}) == ("last", "reward.pooling = last")


@pytest.mark.parametrize("name", ["score", "value_head", "v_head.summary"])
def test_a_critic_keeps_the_head_of_a_reward_model(models: Path, name: str) -> None:
    batch = collate(experience(), torch.device("cpu"))
    reward = load_reward(models / name, FP32)
    critic = load_critic(models / name, FP32, seed=0)
    assert critic.head == name
    with torch.no_grad():
        values = critic(batch.input_ids, batch.action_index)
        scored = reward(batch.input_ids, batch.action_index)
    torch.testing.assert_close(values, scored, rtol=0, atol=1e-5)


def test_a_critic_answers_what_normalised_rewards_are(models: Path) -> None:
    batch = collate(experience(), torch.device("cpu"))
    critic = load_critic(models / "openrlhf", FP32, seed=0, statistics=(0.5, 2.0))
    with torch.no_grad():
        values = critic(batch.input_ids, batch.action_index)
        scored = load_reward(models / "openrlhf", FP32)(batch.input_ids, batch.action_index)
    torch.testing.assert_close(values, (scored - 0.5) / 2.0, rtol=0, atol=1e-5)


def test_a_critic_from_any_other_directory_has_a_new_head(models: Path) -> None:
    critic = load_critic(models / "policy", FP32, seed=0)
    assert critic.head is None
    assert critic.value_head.bias is None


def test_statistics_of_a_reward_model(models: Path, tmp_path: Path) -> None:
    from slurm_rlhf.config.check import reward_statistics
    from slurm_rlhf.rewards.scored import reward_scale

    assert reward_statistics(str(models / "openrlhf")) == (0.5, 2.0)
    assert reward_statistics(str(models / "score")) is None
    scale, stated = reward_scale(config_of(models, "openrlhf", normalize_enable=True))
    assert scale is not None
    assert normalized([2.5], scale).tolist() == [1.0]
    assert "config.json: mean 0.5, std 2" in stated
    assert "all rewards of the run so far" in reward_scale(config_of(models, "score", normalize_enable=True))[1]
    assert reward_scale(config_of(models, "openrlhf")) == (None, "")
    config = config_of(models, "score", normalize_enable=True)
    config.reward.model_name_or_path = str(edit_config(make_reward(tmp_path / "rm"), mean=1.0, std=0))
    config.run_dir, config.data.prompt_dataset = str(tmp_path / "run"), __file__
    config.data.max_len, config.rollout.max_new_tokens = 64, 8
    with pytest.raises(ModelError, match=r"mean = 1\.0 and std = 0; two numbers are needed, std above 0"):
        check(config)

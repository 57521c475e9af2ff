"""Several rewards at once: their weighted sum, each apart, and the entries of reward.sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled_responses import IDS, response

from slurm_rlhf.config.check import reward_source
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_models import RewardPart
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.records import LOST, STOP, Prompt
from slurm_rlhf.rewards.scored import Rewards, episode_rewards
from slurm_rlhf.rewards.sources import WeightedRewards, close_source, weighted
from slurm_rlhf.rewards.sources import reward_source as made_source
from slurm_rlhf.run.experience import component_weights


def answered(*rewards: float | None, **more: Any) -> Rewards:
    out = np.array([value is None for value in rewards])
    return Rewards(np.array([value or 0.0 for value in rewards], np.float32), skipped=out, **more)


def test_the_sum_is_of_those_that_apply() -> None:
    parts = [RewardPart("a", 2.0), RewardPart("b", 0.5, [-1.0, 1.0])]
    found = weighted(parts, [answered(1, 2, None, None), answered(4, None, -8, None)], [[0, 1], [2, 3]])
    assert found.rewards.tolist() == [2.5, 4.0, -0.5, 0.0]
    assert found.skipped.tolist() == [False, False, False, True]
    assert found.components["a"].tolist() == [1.0, 2.0, 0.0, 0.0]
    assert found.components["b"].tolist() == [1.0, 1.0, -1.0, -1.0]  # the mean of the others to the prompt


def test_a_sum_without_the_reward_model_has_the_others() -> None:
    parts, prompts = [RewardPart("a", 2.0), RewardPart("b")], [Prompt(0, "p", IDS)]
    rest = WeightedRewards(parts, [lambda *asked: answered(3), None]).without_model()
    assert rest(prompts, [response(0, "7")]).rewards.tolist() == [6.0]


def test_scores_logs_and_failures_are_kept() -> None:
    one = Rewards(np.float32([1, 0]), failed=np.array(["", "late"]))
    two = Rewards(np.float32([1, 1]), np.float32([0, 1]), {"x": np.float32([3])}, {"y": np.float32([4, 5])})
    found = weighted([RewardPart("a"), RewardPart("b")], [one, two], [[0, 1]])
    assert (found.scores.tolist(), found.failed.tolist()) == ([0, 1], ["", "late"])
    assert {name: values.tolist() for name, values in found.extra_logs.items()} == {"b/x": [3], "b/y": [4, 5]}
    assert found.skipped is None


def test_an_environment_counts_with_another_source_and_its_lost_episodes_are_skipped() -> None:
    config = Config()
    config.env.path, config.reward.preset = "game.py", "exact"
    assert list(reward_source(config)) == ["env.path: no such file: game.py"]
    source = made_source(config)
    try:
        prompts, found = [], []
        for number, (text, reason, reward) in enumerate((("7", STOP, 0.5), ("8", STOP, 0.5), ("7", LOST, 0.0))):
            prompts.append(Prompt(number, "p", IDS, "7", {"input": "p"}))
            found.append(response(number, text, finish_reason=reason, reward=reward))
        answer = source(prompts, found, 1)
    finally:
        close_source(source)
    assert answer.skipped.tolist() == [False, False, True]
    assert answer.rewards[:2].tolist() == [1.5, 0.5]
    assert answer.components["environment"][:2].tolist() == [0.5, 0.5]
    assert answer.components["source"][:2].tolist() == [1.0, 0.0]
    config.reward.preset, config.reward.sources = "", [RewardPart("environment", preset="exact")]
    assert "the name 'environment' is that of the rewards of env.path" in "\n".join(reward_source(config))
    config.reward.sources = [RewardPart("a", 0.5, preset="exact")]
    assert component_weights(config) == {"environment": 1.0, "a": 0.5}
    config.reward.sources = []
    assert made_source(config) is episode_rewards
    found[0].score, found[1].logs = 2.0, {"moves": 3.0}
    own = episode_rewards(prompts, found)
    assert (own.scores.tolist(), own.extra_logs["moves"].tolist()) == ([2, 0, 0], [3])


FILE = """
[[reward.sources]]
name = "right"
preset = "exact"

[[reward.sources]]
name = "short"
weight = 0.1
clip = [-1, 1]
remote_url = "reward.py"
"""


def test_entries_are_read_and_written_back(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    (tmp_path / "reward.py").write_text("")
    config = load_config(tmp_path / "run.toml")
    wanted = RewardPart("short", 0.1, [-1, 1], str(tmp_path / "reward.py"))
    assert config.reward.sources == [RewardPart("right", preset="exact"), wanted]
    assert component_weights(config) == {"right": 1.0, "short": 0.1}
    assert list(reward_source(config)) == []
    (tmp_path / "again.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "again.toml").reward == config.reward


@pytest.mark.parametrize(
    ("entry", "stated"),
    [
        ('nam = "a"', "an entry has no 'nam'; did you mean name?"),
        ("weight = true", "reward.sources: weight takes a number, got true"),
        ("name = 3", "reward.sources: name takes a string, got 3"),
        ("clip = [1]", "clip takes two numbers, the lower first, got [1.0]"),
        ("clip = [1, 1]", "clip takes two numbers, the lower first, got [1.0, 1.0]"),
    ],
)
def test_entries_that_cannot_be_read(tmp_path: Path, entry: str, stated: str) -> None:
    (tmp_path / "run.toml").write_text(f"[[reward.sources]]\n{entry}\n")
    with pytest.raises(ConfigError) as failed:
        load_config(tmp_path / "run.toml")
    assert stated in str(failed.value)


EXACT = RewardPart("a", preset="exact")


@pytest.mark.parametrize(
    ("parts", "keys", "stated"),
    [
        ([EXACT, EXACT], {}, "the name 'a' is there twice"),
        ([RewardPart("", preset="exact")], {}, "the name '' is empty"),
        ([RewardPart("a")], {}, "reward.sources, a: no source is set: give each entry one of remote_url, function"),
        ([RewardPart("a", preset="exact", model=True)], {"model_name_or_path": "m"}, "preset and model is set"),
        ([EXACT], {"remote_url": "x.py"}, "reward.remote_url and reward.sources are both set"),
        ([EXACT], {"model_name_or_path": "m"}, "has 0 entries with model = true, and reward.model_name_or_path = 'm'"),
        ([RewardPart("a", model=True)], {}, "has 1 entries with model = true, and reward.model_name_or_path = ''"),
        ([RewardPart("a", preset="regex")], {}, "reward.sources, a: reward.preset_value is empty"),
        ([RewardPart("a", remote_url="/absent.py")], {}, "/absent.py"),
    ],
)
def test_entries_that_do_not_go_together(parts: list[RewardPart], keys: dict[str, str], stated: str) -> None:
    config = Config()
    config.reward.sources = parts
    for name, value in keys.items():
        setattr(config.reward, name, value)
    assert stated in "\n".join(reward_source(config))

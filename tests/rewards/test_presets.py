"""Rewards that need no code."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sampled_responses import item

from slurm_rlhf.config.reward_sources import preset
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.rewards.presets import Preset
from slurm_rlhf.wire.timeouts import MATH_S


@pytest.mark.parametrize(
    ("name", "value", "given", "reward"),
    [
        ("exact", "", item(" 4\n", "4"), 1),
        ("exact", "", item("44", "4"), 0),
        ("exact", "", item("4", 4), 1),
        ("regex", r"answer: (\S+)", item("answer: 3, no, answer: 4", "4"), 1),
        ("regex", r"answer: (\S+)", item("answer: 4, no, answer: 3", "4"), 0),
        ("regex", r"answer: (\S+)", item("4", "4"), 0),
        ("regex", r"<think>.*</think>", item("<think>x</think>"), 1),
        ("regex", r"<think>.*</think>", item("x"), 0),
        ("length", "10", item("", tokens=10), 1),
        ("length", "10", item("", tokens=15), 0.5),
        ("length", "10", item("", tokens=30), 0),
    ],
)
def test_rewards(name: str, value: str, given: Item, reward: float) -> None:
    assert Preset(name, value).answer([given], 1) == {"rewards": [reward], "scores": [reward]}


def test_a_schema_decides_about_json(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "required": ["a"]}')
    found = Preset("json_schema", str(tmp_path / "schema.json")).answer(
        [item(t) for t in ('{"a": 1}', "{}", "{", "[" * 2000)], 1
    )
    assert found["rewards"] == [1, 0, 0, 0]


def test_mathematics_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(text: str, parsing_timeout: int | None) -> list[Any]:
        assert parsing_timeout == MATH_S
        return [text]

    def verify(gold: Any, target: Any, timeout_seconds: int | None) -> bool:
        assert timeout_seconds == MATH_S
        return bool(gold == target)

    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=read, verify=verify))
    assert Preset("math", "").answer([item("4", "4"), item("5", "4")], 1)["rewards"] == [1, 0]


@pytest.mark.parametrize(
    ("name", "value", "stated"),
    [
        ("regex", "(", "reward.preset_value = '(' is no regular expression"),
        ("length", "short", "takes a number of tokens"),
        ("json_schema", "absent.json", "absent.json is no file with a JSON schema: "),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line(name: str, value: str, stated: str) -> None:
    with pytest.raises(RewardError) as failed:
        Preset(name, value)
    assert stated in str(failed.value)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("name", "value", "stated"),
    [
        ("regex", "", "reward.preset_value is empty: reward.preset = regex needs it"),
        ("exact", "x", "reward.preset_value = x has no effect with reward.preset = exact"),
        ("", "x", "reward.preset_value = x has no effect with reward.preset = empty"),
        (
            "math",
            "",
            "math needs math-verify, which is not installed: pip install 'slurm_rlhf[rewards]'",
        ),
    ],
)
def test_check_sees_what_a_preset_lacks(name: str, value: str, stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_rlhf.config.reward_sources.find_spec", lambda module: None)
    config = Config()
    config.reward.preset, config.reward.preset_value = name, value  # type: ignore[assignment]
    (problem,) = preset(config)
    assert stated in problem

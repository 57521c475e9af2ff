"""Functions of the shapes that TRL's and OpenRLHF's examples have: they run as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sampled_responses import IDS, response

from slurm_rlhf.config.check import reward_source
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import Prompt
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.items import items_of
from slurm_rlhf.rewards.presets import Preset

ROWS: list[dict[str, Any]] = [
    {"input": "2+2=", "label": "4", "ground_truth": "4", "task": "sums"},
    {"input": "ab", "label": "ba", "ground_truth": "ba", "task": "words"},
]
FUNCTIONS = {
    "logging": (
        "def reward_func(completions, ground_truth, trainer_state=None, log_extra=None, log_metric=None, **kwargs):\n"
        "    if log_extra:\n        log_extra('truth', list(ground_truth))\n"
        "    if log_metric:\n        log_metric('share', 0.5)\n"
        "    return [float(trainer_state.global_step), len(ground_truth[1])]\n"
    ),
    "made by a function": (
        "def soft(longest):\n    def punish(completion_ids, **kwargs):\n"
        "        return [min(0.0, float(longest - len(ids))) for ids in completion_ids]\n    return punish\n\n"
        "reward_func = soft(2)\n"
    ),
    "any name": "def _own(completions): ...\n\ndef length_reward(completions):\n    return [1.0, 0.5]\n",
    "tensors": (
        "import torch\n\ndef reward_func(queries, prompts, labels, **kwargs):\n"
        "    reward = torch.tensor([len(q) - len(p) for q, p in zip(queries, prompts)], dtype=torch.bfloat16)\n"
        "    return {'rewards': reward, 'scores': reward, 'extra_logs': {'dummy_scores': reward}}\n"
    ),
}


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("logging", [6, 2]), ("made by a function", [-1, 0]), ("any name", [1, 0.5]), ("tensors", [17, 2])],
)
def test_reward_functions(tmp_path: Path, name: str, rewards: list[float]) -> None:
    (tmp_path / "reward.py").write_text(FUNCTIONS[name])
    prompts = [Prompt(n, row["input"], IDS, row["label"], row) for n, row in enumerate(ROWS)]
    found = [response(n, text, tokens=count) for n, (text, count) in enumerate([("<think>x</think>4", 3), ("ab", 1)])]
    answer = RewardFunction.load(str(tmp_path / "reward.py"))(prompts, found, 6)
    assert answer.rewards.tolist() == rewards
    assert answer.skipped is None or not answer.skipped.any()
    if name == "tensors":
        assert answer.scores.tolist() == answer.extra_logs["dummy_scores"].tolist() == rewards


EPISODE = [
    {
        "role": "assistant",
        "content": "<call>",
        "tool_calls": [{"function": {"name": "ask", "arguments": {"q": "2+2"}}}],
    },
    {"role": "tool", "name": "ask", "content": "[4]", "result": [4]},
    {"role": "assistant", "content": "3"},
]
CALLED = """
def reward_func({taken}, **kwargs):
    asked = [call["function"]["arguments"]["q"] for turn in {taken}[0] for call in turn.get("tool_calls") or ()]
    assert asked == ["2+2"] and [turn["role"] for turn in {taken}[0]] == ["assistant", "tool", "assistant"]
    assert {taken}[0][1]["content"] == {result}
    return [float({taken}[0][-1]["content"] == kwargs["{label}"][0])]
"""
"""As TRL's grpo_agent.py reads the turns: a tool that gave the right answer is not the policy's answer."""


@pytest.mark.parametrize(
    ("taken", "label", "result"), [("completions", "label", "[4]"), ("dialogues", "labels", "'[4]'")]
)
def test_a_function_knows_which_words_the_policy_wrote(tmp_path: Path, taken: str, label: str, result: str) -> None:
    (tmp_path / "reward.py").write_text(CALLED.format(taken=taken, label=label, result=result))
    prompt = Prompt(0, "2+2=", IDS, "4", ROWS[0])
    found = response(0, "<call>43", turns=2, dialogue=json.dumps(EPISODE))
    assert RewardFunction.load(str(tmp_path / "reward.py"))([prompt], [found]).rewards.tolist() == [0]
    exact = Preset("exact", "").answer(items_of([prompt], [found]), 1)["rewards"]
    assert exact == Preset("regex", "4").answer(items_of([prompt], [found]), 1)["rewards"] == [0]


def test_where_a_file_has_several_rewards_of_trl_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def one(completions): ...\n\ndef two(completions):\n    return [2.0]\n")
    with pytest.raises(
        RewardError, match=r"does not define reward_func\(.*; its rewards for TRL are one, two: name one"
    ):
        RewardFunction.load(str(file))
    assert RewardFunction.load(f"{file}:two").function([]) == [2.0]
    config = Config()
    config.reward.remote_url = f"{file}:two"
    assert not [*reward_source(config)]
    with pytest.raises(
        RewardError, match=r"does not define twoo; did you mean two\?; its functions are one, two: name"
    ):
        RewardFunction.load(f"{file}:twoo")


def test_a_file_of_a_package_is_read_as_its_module_and_a_module_by_its_name(tmp_path: Path) -> None:
    """As those of trl/rewards: relative imports, and functions that make a reward function."""
    (tmp_path / "rewards_of_a_package" / "inner").mkdir(parents=True)
    for place, code in {
        "__init__.py": "",
        "tools.py": "def one():\n    return 1.0\n",
        "inner/__init__.py": "",
        "inner/more.py": "from collections.abc import Callable\n\nfrom ..tools import one\n\n"
        "def plain(completions, **kwargs):\n    return [one() for _ in completions]\n\n"
        "def get_soft(longest: int, most=1.0) -> Callable:\n    return plain\n",
    }.items():
        (tmp_path / "rewards_of_a_package" / place).write_text(code)
    file = tmp_path / "rewards_of_a_package" / "inner" / "more.py"
    for name in (f"{file}:plain", "rewards_of_a_package.inner.more:plain"):
        found = RewardFunction.load(name) if ".py" in name else RewardFunction.named(name)
        assert found.function(["a"]) == [1.0]
    three_lines = (
        r"get_soft makes a reward function.*`from rewards_of_a_package.inner.more import get_soft` and "
        r"`reward_func = get_soft\(longest=...\)`"
    )
    with pytest.raises(RewardError, match=three_lines):
        RewardFunction.load(f"{file}:get_soft")
    with pytest.raises(RewardError, match="No module named 'nothing_of_that_name': install it, or name a file"):
        RewardFunction.named("nothing_of_that_name:plain")


def test_a_function_of_the_environments_is_refused_with_what_to_use(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward_func(environments, **kwargs):\n    return [0.0]\n")
    with pytest.raises(RewardError, match=r"takes 'environments', which live in other processes: .* get_reward"):
        RewardFunction.load(str(tmp_path / "reward.py"))

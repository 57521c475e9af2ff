"""Functions and environments of the shapes that TRL's and OpenRLHF's examples have: they run as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sampled_responses import IDS, response

from slurm_rlhf.config.check import reward_source
from slurm_rlhf.config.schema import Config
from slurm_rlhf.environments.kinds import Instances
from slurm_rlhf.environments.records import Answer, Begun, Start, ToolCall, Turn
from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import Prompt
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.items import items_of
from slurm_rlhf.rewards.presets import Preset

ROWS: list[dict[str, Any]] = [
    {"input": "2+2=", "label": "4", "ground_truth": "4", "task": "sums"},
    {"input": "ab", "label": "ba", "ground_truth": "ba", "task": "words"},
]
CHATS: list[dict[str, Any]] = [{**row, "input": [{"role": "user", "content": row["input"]}]} for row in ROWS]
RESPONSES = ("<think>x</think>4", "ab")

TRL = {
    "length": "def reward_func(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n",
    "tokens": "def reward_func(completion_ids, **kwargs):\n    return [float(len(ids)) for ids in completion_ids]\n",
    "column": (
        "import re\n\ndef reward_func(completions, ground_truth, **kwargs):\n"
        "    found = [re.search(r'(\\w+)$', c) for c in completions]\n"
        "    return [1.0 if m and m.group(1) == gt else 0.0 for m, gt in zip(found, ground_truth)]\n"
    ),
    "one task of several": (
        "def reward_func(prompts, completions, task, **kwargs):\n"
        "    return [float('4' in c) if t == 'sums' else None for c, t in zip(completions, task)]\n"
    ),
    "coroutine": (
        "import asyncio\n\nasync def reward_func(prompts, completions, **kwargs):\n"
        "    async def one(c):\n        await asyncio.sleep(0)\n        return float(len(c))\n"
        "    return await asyncio.gather(*(one(c) for c in completions))\n"
    ),
    "logging": (
        "def reward_func(completions, ground_truth, trainer_state=None, log_extra=None, log_metric=None, **kwargs):\n"
        "    if log_extra:\n        log_extra('truth', list(ground_truth))\n"
        "    if log_metric:\n        log_metric('share', 0.5)\n"
        "    return [float(trainer_state.global_step)] * len(completions)\n"
    ),
    "made by a function": (
        "def soft(longest):\n    def punish(completion_ids, **kwargs):\n"
        "        return [min(0.0, float(longest - len(ids))) for ids in completion_ids]\n    return punish\n\n"
        "reward_func = soft(2)\n"
    ),
}
"""Texts as prompts and completions."""
TRL_CHATS = {
    "format": (
        "import re\n\ndef reward_func(completions, **kwargs):\n"
        "    contents = [completion[0]['content'] for completion in completions]\n"
        "    return [1.0 if re.match(r'^<think>.*?</think>', content) else 0.0 for content in contents]\n"
    ),
    "last message": (
        "def reward_func(prompts, completions, ground_truth, **kwargs):\n"
        "    assert all(prompt[-1]['role'] == 'user' for prompt in prompts)\n"
        "    return [float(c[-1]['content'].endswith(t)) for c, t in zip(completions, ground_truth)]\n"
    ),
}
OPENRLHF = {
    "tensors": (
        "import torch\n\ndef reward_func(queries, prompts, labels, **kwargs):\n"
        "    reward = torch.tensor([float(q.endswith(l)) for q, l in zip(queries, labels)])\n"
        "    return {'rewards': reward, 'scores': reward, 'extra_logs': {'dummy_scores': reward}}\n"
    ),
    "one tensor": (
        "import torch\n\ndef reward_func(queries, prompts, labels):\n"
        "    return torch.tensor([len(q) - len(p) for q, p in zip(queries, prompts)], dtype=torch.bfloat16)\n"
    ),
}
TRL["any name"] = "def _own(completions): ...\n\ndef length_reward(completions):\n    return [1.0, 0.5]\n"
EXPECTED = {
    "any name": [1, 0.5],
    "length": [17, 2],
    "tokens": [3, 1],
    "column": [1, 0],
    "one task of several": [1, None],
    "coroutine": [17, 2],
    "logging": [6, 6],
    "made by a function": [-1, 0],
    "format": [1, 0],
    "last message": [1, 0],
    "tensors": [1, 0],
    "one tensor": [17, 2],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_reward_functions(tmp_path: Path, name: str) -> None:
    (tmp_path / "reward.py").write_text({**TRL, **TRL_CHATS, **OPENRLHF}[name])
    rows = CHATS if name in TRL_CHATS else ROWS
    prompts = [Prompt(n, ROWS[n]["input"], IDS, row["label"], row) for n, row in enumerate(rows)]
    found = [response(n, text, tokens=count) for n, text, count in zip((0, 1), RESPONSES, (3, 1), strict=True)]
    answer = RewardFunction.load(str(tmp_path / "reward.py"))(prompts, found, 6)
    skipped = [False] * 2 if answer.skipped is None else answer.skipped.tolist()
    values = [None if out else value for out, value in zip(skipped, answer.rewards.tolist(), strict=True)]
    assert values == EXPECTED[name]


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


TRL_GAME = '''
import random

class WordGame:
    def __init__(self):
        self.client = None

    def reset(self, **kwargs) -> str | None:
        self.word, self.reward, self.done = kwargs["label"], 0.0, False
        return "Find the word. "

    def guess(self, guess: str) -> str:
        """
        Makes a guess in the game.

        Args:
            guess: The word.

        Returns:
            The feedback.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = guess == self.word
        self.reward = float(self.done)
        return "right" if self.done else "wrong"

    def get_reward(self) -> float:
        return self.reward
'''
OPENRLHF_GAME = """
import random
from typing import Any, Dict

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = random.randint(2, 2)

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.step_idx += 1
        done = self.step_idx >= self.max_steps
        reward = torch.tensor(1.0) if done else torch.tensor(0)
        right = states["action_text"] == states["label"]
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "\\n[right]" if done and right else "\\n[go on]\\n",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": reward, "turn_count": self.step_idx},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def game(tmp_path: Path, code: str) -> Instances:
    (tmp_path / "game.py").write_text(code)
    return Instances(str(tmp_path / "game.py"))


START = msgspec.to_builtins(Start(ROWS[1], "ba", [{"role": "user", "content": "ab"}], "ab"))


def turned(played: Instances, turn: Turn) -> Answer:
    return msgspec.convert(played.turn(0, msgspec.to_builtins(turn)), Answer)


def test_an_environment_of_trl(tmp_path: Path) -> None:
    played = game(tmp_path, TRL_GAME)
    (tool,) = played.describe()[""]["schemas"]
    assert (tool["function"]["name"], list(tool["function"]["parameters"]["properties"])) == ("guess", ["guess"])
    begun = msgspec.convert(played.begin(0, START), Begun)
    assert begun.messages == [{"role": "user", "content": "abFind the word. "}]
    for word, said in (("ab", "wrong"), ("ba", "right"), ("ba", "ValueError: Game over.")):
        answer = turned(played, Turn("", [ToolCall("guess", {"guess": word})]))
        assert answer.messages is not None
        assert said in answer.messages[0]["content"]
    assert turned(played, Turn("ba")).done
    assert msgspec.convert(played.end(0), Answer).reward == 1.0


def test_an_agent_of_openrlhf(tmp_path: Path) -> None:
    played = game(tmp_path, OPENRLHF_GAME)
    played.begin(0, START)
    first, second = (turned(played, Turn("ba")) for _ in range(2))
    assert (first.text, first.reward, first.done) == ("\n[go on]\n", 0.0, False)
    assert (second.text, second.reward, second.score, second.done) == ("\n[right]", 1.0, 1.0, True)
    assert second.logs == {"dummy_scores": 1.0, "turn_count": 2.0}

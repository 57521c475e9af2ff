"""What a reward function is given: what its signature asks for, as copies; the page's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurm_rlhf.docs.pages import page
from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import Experience, Prompt, Trajectory, pack
from slurm_rlhf.rewards.function import ARGUMENTS, RewardFunction
from slurm_rlhf.wire.codec import decode, encode

ROWS: list[dict[str, Any]] = [
    {"input": "1+1=", "label": ["2"], "level": {"name": "easy"}},
    {"input": "2+2=", "label": ["4"], "level": {"name": "hard"}},
]


def batch(samples: int = 2) -> tuple[list[Prompt], list[Trajectory]]:
    """Two prompts with `samples` responses each; the second response of each was cut off."""
    ids = np.array([3, 4], dtype=np.int32)
    prompts = [Prompt(i, row["input"], ids, label=row["label"], row=row) for i, row in enumerate(ROWS)]
    found = [
        Trajectory(
            *(prompt.index, sample, ids, np.array([5 + sample], dtype=np.int32)),
            *(np.zeros(1, np.float32), np.ones(1, np.bool_), ["stop", "length"][sample % 2], f"{sample}", []),
        )
        for prompt in prompts
        for sample in range(samples)
    ]
    return [prompt for prompt in prompts for _ in range(samples)], found


def load(tmp_path: Path, body: str) -> RewardFunction:
    file = tmp_path / "reward.py"
    file.write_text(body, encoding="utf-8")
    return RewardFunction.load(str(file))


def test_everything_is_there_for_a_function_that_takes_everything(tmp_path: Path) -> None:
    body = (
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    global seen\n    seen = {'queries': queries, 'prompts': prompts, 'labels': labels, **kwargs}\n"
        "    return [0.0] * len(queries)\n"
    )
    reward = load(tmp_path, body)
    reward(*batch(), 7)
    seen = reward._function.__globals__["seen"]
    assert list(seen) == list(ARGUMENTS)
    assert seen["step"] == 7
    assert seen["rows"] == [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]  # all columns, the prompt's and the label's included
    assert seen["prompt_ids"] == [[3, 4]] * 4
    assert seen["response_ids"] == [[5], [6], [5], [6]]
    assert seen["finish_reasons"] == ["stop", "length", "stop", "length"]
    assert seen["queries"] == ["1+1=0", "1+1=1", "2+2=0", "2+2=1"]


@pytest.mark.parametrize(
    "signature",
    [
        "queries, prompts, labels",
        "labels, responses",
        "responses, *, labels, rows, finish_reasons, step, weight=0.5",
        "q, p, answers",  # OpenRLHF passes by place, whatever the names
        "q, p, answers=None, **others",
        "*args, **kwargs",
        "**kwargs",
        "responses",
    ],
)
def test_only_what_the_signature_takes_is_passed(tmp_path: Path, signature: str) -> None:
    given = "answers" if "answers" in signature else "labels" if "labels" in signature else None
    look = f"    assert {given} == [['2'], ['2'], ['4'], ['4']], {given}\n" if given else ""
    reward = load(tmp_path, f"def reward_func({signature}):\n{look}    return [1, 2, 3, 4]\n")
    assert reward(*batch()).rewards.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("definition", "told"),
    [
        ("def reward_func(completions, ground_truth):", "'completions' that nothing is passed for"),
        ("def reward_func(completions, ground_truth):", "TRL's completions are `responses` here"),
        ("def reward_func(completions, answer, level):", "a parameter 'completions'"),
        ("def reward_func(prompts, completions, **kwargs):", "a parameter 'completions'"),
        ("def reward_func(responses, level):", "Passed are queries, prompts, labels, responses, rows, prompt_ids"),
        ("def reward_func(responses, level):", "rows[i]['level']"),
        ("def reward_func(queries, prompts, labels, level):", "a parameter 'level'"),
        ("def reward_func(responses, /):", "a parameter 'responses'"),
        ("async def reward_func(queries, prompts, labels):", "`async def`, and nothing awaits it"),
        ("def reward_func(queries, prompts, labels):\n    yield 1", "is a generator"),
    ],
)
def test_a_signature_that_cannot_be_served_is_an_error_when_the_file_is_loaded(
    tmp_path: Path, definition: str, told: str
) -> None:
    with pytest.raises(RewardError) as caught:
        load(tmp_path, f"import math\n\n{definition}\n    return [0.0]\n")
    assert str(caught.value).startswith(f"{tmp_path / 'reward.py'}:3: reward_func ")
    assert told in str(caught.value)


def test_an_object_with_a_coroutine_is_refused_as_well(tmp_path: Path) -> None:
    body = "class Judge:\n    async def __call__(self, responses):\n        return [0]\n\nreward_func = Judge()\n"
    with pytest.raises(RewardError, match=r"reward.py: reward_func is declared with `async def`"):
        load(tmp_path, body)


def test_what_a_function_changes_does_not_live_on(tmp_path: Path) -> None:
    body = (
        "def reward_func(responses, labels, rows, finish_reasons, response_ids):\n"
        "    told = [(label[0], row['level']['name'], row.get('seen')) for label, row in zip(labels, rows)]\n"
        "    for label, row, ids in zip(labels, rows, response_ids):\n"
        "        label.append('x'); row['level']['name'] = 'x'; row['seen'] = True; ids.clear()\n"
        "    labels.clear(); finish_reasons.clear()\n"
        "    assert told[0] == ('2', 'easy', None) and told[1] == told[0] and told[2] == ('4', 'hard', None), told\n"
        "    assert all(len(label) == 2 for label in labels)  # a copy for each response\n"
        "    return [0.0] * len(responses)\n"
    )
    reward, (prompts, found) = load(tmp_path, body), batch()
    for _ in range(2):
        reward(prompts, found)
    assert ROWS[0] == {"input": "1+1=", "label": ["2"], "level": {"name": "easy"}}
    assert [t.response_ids.tolist() for t in found] == [[5], [6], [5], [6]]


def test_experience_knows_why_its_responses_ended() -> None:
    _, found = batch()
    experience = pack(found, [0.0] * 4)
    assert experience.finish_reasons == ["stop", "length", "stop", "length"]
    part = experience.select([3, 0])
    assert part.finish_reasons == ["length", "stop"]
    assert decode(encode(part), Experience).finish_reasons == ["length", "stop"]


def test_the_pages_example_runs_and_names_every_argument(tmp_path: Path) -> None:
    section = page("data_and_reward").split("## The reward function")[1]
    for name in ARGUMENTS:
        assert f"| `{name}` |" in section
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert example
    reward = load(tmp_path, example[1])
    prompts, found = batch()
    for prompt in prompts:
        prompt.label = prompt.row["label"][0]
    for trajectory, text in zip(found, ["2", "2", "5", "4"], strict=True):
        trajectory.text = text
    answer = reward(prompts, found, 1)
    assert answer.rewards.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert answer.scores is not None
    assert answer.scores.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert answer.extra_logs["cut_off"].tolist() == [0.0, 1.0, 0.0, 1.0]

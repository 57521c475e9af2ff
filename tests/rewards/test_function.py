"""The user's reward function: how it is loaded, what it can ask for, what it may answer, and where its prints go."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_packages import packages_loaded
from sampled_responses import IDS, response

from slurm_rlhf.docs.pages import page
from slurm_rlhf.errors import ConfigError, RewardError
from slurm_rlhf.records import Experience, Prompt, Trajectory, pack
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.scored import Scoring
from slurm_rlhf.rewards.signature import ARGUMENTS, BY_PLACE, Taken, taken
from slurm_rlhf.wire.codec import decode, encode


def batch(count: int = 2) -> tuple[list[Prompt], list[Trajectory]]:
    prompts = [Prompt(i, f"{i}+{i}=", IDS, label=str(2 * i), row={"level": i}) for i in range(count)]
    return prompts, [response(i, f"<{i}>") for i in range(count)]


def load(tmp_path: Path, body: str, name: str = "reward.py") -> RewardFunction:
    file = tmp_path / name
    file.write_text(body, encoding="utf-8")
    return RewardFunction.load(str(file))


def returning(tmp_path: Path, expression: str) -> RewardFunction:
    head = "import numpy as np\nimport torch\n\ndef reward_func(queries, prompts, labels, **kwargs):\n"
    return load(tmp_path, f"{head}    return {expression}\n")


@pytest.mark.parametrize(
    "expression",
    [
        *("[1, 0.5]", "(True, 0.5)", "np.array([1, 0.5])", "np.float32([1, 0.5])", "[np.float64(1), np.array(0.5)]"),
        *("torch.tensor([1.0, 0.5], requires_grad=True)", "[torch.tensor(1), torch.tensor(0.5)]"),
    ],
)
def test_numbers_in_every_form(tmp_path: Path, expression: str) -> None:
    assert returning(tmp_path, expression)(*batch()).rewards.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("one", ["1", "torch.tensor(1)"])
def test_dict_with_scores_and_logs(tmp_path: Path, one: str) -> None:
    said = f"{{'rewards': [2, 3], 'scores': [0, {one}], 'extra_logs': {{'a': 4, 'b': [5, 6]}}}}"
    answer = returning(tmp_path, said)(*batch())
    assert answer.rewards.tolist() == [2.0, 3.0]
    assert answer.scores.tolist() == [0.0, 1.0]
    assert {name: values.tolist() for name, values in answer.extra_logs.items()} == {"a": [4.0], "b": [5.0, 6.0]}


@pytest.mark.parametrize(
    ("expression", "stated"),
    [
        ("[1.0]", "1 rewards for 2 responses"),
        ("[1.0, 2.0, 3.0]", "3 rewards for 2 responses"),
        ("[1.0, float('nan')]", "nan (float) at index 1"),
        ("[-float('inf'), 1.0]", "-inf (float) at index 0"),
        ("[1e39, 1.0]", "1e+39 (float) at index 0"),
        ("[10**400, 1.0]", "(int) at index 0"),
        ("[1.0, 'good']", "'good' (str) at index 1"),
        ("[None, 1.0]", "None (NoneType) at index 0"),
        ("[[1.0], [2.0]]", "[1.0] (list) at index 0"),
        ("np.ones((2, 1))", "[1.0] (list) at index 0"),
        ("None", "None (NoneType); expected a list, array or tensor of 2 numbers"),
        ("0.5", "0.5 (float); expected a list"),
        ("(value for value in [1, 2])", "generator"),
        ("{'scores': [1, 2]}", "a dict without 'rewards'"),
        ("{'rewards': [1, 2], 'score': [1, 2]}", "unknown key 'score'; valid: rewards, scores, components"),
        ("{'rewards': [1, 2], 'scores': [1]}", "in 'scores' 1 scores for 2 responses"),
        ("{'rewards': [1, 2], 'extra_logs': [1, 2]}", "'extra_logs' as list"),
        ("{'rewards': [1, 2], 'extra_logs': {'a': 'x'}}", "in extra_logs['a'] 'x' (str)"),
        ("{'rewards': [1, 2], 'extra_logs': {'a': [1]}}", "in extra_logs['a'] 1 values for 2 responses"),
        ("{'rewards': [1, 2], 'components': [1, 2]}", "'components' as list; expected a dict of name"),
        ("{'rewards': [1, 2], 'components': {'a': 1.0}}", "in components['a'] 1.0 (float); expected a list"),
        ("{'rewards': [1, 2], 'components': {'a': [1, None]}}", "in components['a'] None (NoneType) at index 1"),
        (
            "{'rewards': [1, 2], 'components': {'a': [1, 2]}, 'extra_logs': {'a': 3}}",
            "'a' in 'components' and in 'extra_logs': components are logged, too",
        ),
    ],
)
def test_answers_that_are_no_rewards(tmp_path: Path, expression: str, stated: str) -> None:
    with pytest.raises(RewardError, match=re.escape(stated)) as caught:
        returning(tmp_path, expression)(*batch())
    assert str(caught.value).startswith(f"{tmp_path / 'reward.py'}: reward_func returned")


def test_what_the_function_raises_is_reported_with_its_line(tmp_path: Path) -> None:
    reward = load(
        tmp_path,
        "def score(text):\n    return 1 / len(text.strip('<01>'))\n\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n    return [score(r) for r in kwargs['responses']]\n",
    )
    with pytest.raises(RewardError) as caught:
        reward(*batch())
    stated = f"{tmp_path / 'reward.py'}:2: reward_func raised ZeroDivisionError: division by zero"
    assert str(caught.value) == stated
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    leaves = load(tmp_path, "import sys\n\ndef reward_func(*args, **kwargs):\n    sys.exit(3)\n", "leaves.py")
    with pytest.raises(RewardError, match=r"leaves.py:4: reward_func raised SystemExit: 3"):
        leaves(*batch())


@pytest.mark.parametrize(
    ("body", "stated"),
    [
        ("x = 1\ndef reward_func(:\n", "reward.py:2: cannot be imported: SyntaxError"),
        ("import no_such_module\n", "reward.py:1: cannot be imported: ModuleNotFoundError: No module named"),
        ("def reward(queries):\n    pass\n", "does not define reward_func(queries, prompts, labels, **kwargs)"),
        ("reward_func = 3\n", "does not define reward_func"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, body: str, stated: str) -> None:
    with pytest.raises(RewardError, match=re.escape(stated)) as caught:
        load(tmp_path, body)
    assert str(tmp_path / "reward.py") in str(caught.value)


@pytest.mark.parametrize(
    ("source", "stated"),
    [("", "no such file"), ("absent.py", "absent.py"), ("http://host:5000/score", "no such file")],
)
def test_sources_that_cannot_be_used(source: str, stated: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward\.remote_url: .*{stated}"):
        RewardFunction.load(source)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.py"):
        load(tmp_path, "reward_func = print\n", name="reward.txt")


def test_neighbours_and_dataclasses_work(tmp_path: Path) -> None:
    (tmp_path / "rollout_test_neighbour.py").write_text("BONUS = 7\n", encoding="utf-8")
    reward = load(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from rollout_test_neighbour import BONUS\n"
        "@dataclass\nclass Score:\n    value: int = BONUS\n\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n    return [Score().value for _ in queries]\n",
    )
    assert reward(*batch()).rewards.tolist() == [7.0, 7.0]


def test_the_conductors_half_of_the_room_is_light() -> None:
    code = "import slurm_rlhf.rewards.function, slurm_rlhf.engine.engine, slurm_rlhf.engine.vllm"
    assert not {"torch", "vllm", "transformers"} & packages_loaded([sys.executable, "-c", code])


def test_a_builtin_that_tells_nothing_of_its_arguments_gets_three_by_place() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    assert taken(max, "it") == Taken(BY_PLACE, ())


ROWS: list[dict[str, Any]] = [
    {"input": "1+1=", "label": ["2"], "level": {"name": "easy"}},
    {"input": "2+2=", "label": ["4"], "level": {"name": "hard"}},
]


def sampled(samples: int = 2) -> tuple[list[Prompt], list[Trajectory]]:
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


def test_everything_is_there_for_a_function_that_takes_everything(tmp_path: Path) -> None:
    body = (
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    global seen\n    seen = {'queries': queries, 'prompts': prompts, 'labels': labels, **kwargs}\n"
        "    return [float(label[0]) for label in labels]\n"
    )
    reward = load(tmp_path, body)
    answer = reward(*sampled(), 7)
    assert (answer.rewards.dtype, answer.rewards.tolist()) == (np.float32, [2.0, 2.0, 4.0, 4.0])
    assert (answer.scores, answer.extra_logs) == (None, {})
    seen = reward.function.__globals__["seen"]
    assert list(seen) == list(ARGUMENTS)
    assert seen["step"] == 7
    assert seen["rows"] == [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]  # all columns, the prompt's and the label's included
    assert seen["prompt_ids"] == [[3, 4]] * 4
    assert seen["response_ids"] == [[5], [6], [5], [6]]
    assert seen["finish_reasons"] == ["stop", "length", "stop", "length"]
    assert seen["queries"] == ["1+1=0", "1+1=1", "2+2=0", "2+2=1"]
    assert (seen["prompts"], seen["responses"]) == (["1+1=", "1+1=", "2+2=", "2+2="], ["0", "1", "0", "1"])


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
    assert reward(*sampled()).rewards.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("definition", "stated"),
    [
        ("def reward_func(responses, level):", "Passed are queries, prompts, labels, responses, rows, prompt_ids"),
        ("def reward_func(responses, level):", "rows[i]['level']"),
        ("def reward_func(queries, prompts, labels, level):", "a parameter 'level'"),
        ("def reward_func(responses, /):", "a parameter 'responses'"),
        ("def reward_func(q, p, weight=0.5):", "a parameter 'q'"),  # its third is no place for labels
    ],
)
def test_a_signature_that_cannot_be_served_is_an_error_when_the_file_is_loaded(
    tmp_path: Path, definition: str, stated: str
) -> None:
    with pytest.raises(RewardError, match=re.escape(stated)) as caught:
        load(tmp_path, f"import math\n\n{definition}\n    return [0.0]\n")
    assert str(caught.value).startswith(f"{tmp_path / 'reward.py'}:3: reward_func ")


@pytest.mark.parametrize(
    "body",
    [
        "class Judge:\n    async def __call__(self, responses):\n        return [3, 4]\n\nreward_func = Judge()\n",
        "import asyncio\n\nasync def reward_func(a, b, c):\n    await asyncio.sleep(0)\n    return [3, 4]\n",
    ],
)
def test_coroutines_are_run_to_their_end(tmp_path: Path, body: str) -> None:
    assert load(tmp_path, body)(*batch()).rewards.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("definition", "expression"),
    [
        ("def reward_func(completions, **kwargs):", "kwargs['level'] == [0, 1] and set(kwargs) > {'prompts'}"),
        ("def reward_func(prompts, completions, level):", "prompts == ['0+0=', '1+1='] and level == [0, 1]"),
        ("async def reward_func(completions, level=None, other=7):", "level == [0, 1] and other == 7"),
        ("def reward_func(completion_ids, trainer_state, **kw):", "trainer_state.global_step == 4 and completion_ids"),
        ("def reward_func(completions, log_metric, log_extra):", "log_metric('a', 1) is log_extra('b', [1]) is None"),
    ],
)
def test_trls_keywords_are_passed_by_name(tmp_path: Path, definition: str, expression: str) -> None:
    reward = load(tmp_path, f"{definition}\n    assert {expression}, locals()\n    return [1.0, None]\n")
    found = reward(*batch(), 4)
    assert found.rewards.tolist() == [1.0, 0.0]
    assert found.skipped.tolist() == [False, True]


def test_trl_gets_messages_where_the_data_has_messages(tmp_path: Path) -> None:
    prompts, found = batch(1)
    prompts[0].row["input"] = [{"role": "user", "content": "0+0="}]
    body = "def reward_func(prompts, completions):\n    assert prompts == [[{'role': 'user', 'content': '0+0='}]]\n"
    body += "    assert completions == [[{'role': 'assistant', 'content': '<0>'}]]\n    return [1]\n"
    assert load(tmp_path, body)(prompts, found).rewards.tolist() == [1]


def test_a_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"takes 'answer', and the data has no such column; it has: level"):
        load(tmp_path, "def reward_func(completions, answer):\n    return [0]\n")(*batch())


def test_what_a_function_changes_does_not_live_on(tmp_path: Path) -> None:
    body = (
        "def reward_func(responses, labels, rows, finish_reasons, response_ids):\n"
        "    stated = [(label[0], row['level']['name'], row.get('seen')) for label, row in zip(labels, rows)]\n"
        "    for label, row, ids in zip(labels, rows, response_ids):\n"
        "        label.append('x'); row['level']['name'] = 'x'; row['seen'] = True; ids.clear()\n"
        "    labels.clear(); finish_reasons.clear()\n"
        "    easy = ('2', 'easy', None)\n"
        "    assert stated[:3] == [easy, easy, ('4', 'hard', None)], stated\n"
        "    assert all(len(label) == 2 for label in labels)  # a copy for each response\n"
        "    return [0.0] * len(responses)\n"
    )
    reward, (prompts, found) = load(tmp_path, body), sampled()
    for _ in range(2):
        reward(prompts, found)
    assert ROWS[0] == {"input": "1+1=", "label": ["2"], "level": {"name": "easy"}}
    assert [t.response_ids.tolist() for t in found] == [[5], [6], [5], [6]]


def test_experience_knows_why_its_responses_ended() -> None:
    _, found = sampled()
    experience = pack(found, [0.0] * 4)
    assert experience.finish_reasons == ["stop", "length", "stop", "length"]
    part = experience.select([3, 0])
    assert part.finish_reasons == ["length", "stop"]
    assert decode(encode(part), Experience).finish_reasons == ["length", "stop"]


def test_the_pages_example_runs_and_names_every_argument(tmp_path: Path) -> None:
    section = page("rewards").split("## The reward function")[1]
    for name in ARGUMENTS:
        assert f"| `{name}` |" in section
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert example
    reward = load(tmp_path, example[1])
    prompts, found = sampled()
    for prompt in prompts:
        prompt.label = prompt.row["label"][0]
    for trajectory, text in zip(found, ["2", "2", "5", "4"], strict=True):
        trajectory.text = text
    answer = reward(prompts, found, 1)
    assert answer.rewards.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert answer.scores.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert answer.extra_logs["cut_off"].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_the_traceback_of_what_it_raises_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward_func(responses):\n    raise ValueError('no')\n")
    log = tmp_path / "reward.log"
    with pytest.raises(RewardError, match=rf"ValueError: no \(traceback: {log}\)"):
        Scoring(RewardFunction.load(str(tmp_path / "reward.py")), 20.0, log)([], [], 1)
    assert log.read_text().startswith("Traceback")
    assert "ValueError: no" in log.read_text()

"""Tasks of reasoning-gym as prompts: the same for the same keys, with the library's scorers, and errors by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, cast

import pytest
from waiting import HANG_S

from slurm_rlhf.config.schema import Data
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.rewards import reasoning_gym
from slurm_rlhf.rewards.reasoning_gym import TASK, task_rows, task_score
from slurm_rlhf.rewards.signature import answered

pytestmark = pytest.mark.slow
NAMES = "basic_arithmetic,word_ladder,arc_agi"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    data = Data(reasoning_gym=NAMES, max_samples=7, input_key="question", label_key="answer")
    return [row for _, row in task_rows(data)]


def score(row: dict[str, str], response: str) -> float:
    return task_score(cast("Any", {"row": row, "dialogue": answered(response)}))


def test_tasks_take_turns_and_their_own_answers_score(rows: list[dict[str, str]]) -> None:
    assert [row[TASK] for row in rows] == (NAMES.split(",") * 3)[:7]
    assert len({row["question"] for row in rows}) == 7
    assert [score(row, row["answer"]) for row in rows] == [1.0] * 7
    assert score(rows[0], f"Well. <answer> {rows[0]['answer']} </answer> or 7") == 1.0
    assert score(rows[0], "no number") < 0.1


def test_the_same_keys_give_the_same_rows_in_every_process(rows: list[dict[str, str]]) -> None:
    """The rows of word_ladder depend on the order of sets, which differs from process to process."""
    code = (
        "import json, sys\nfrom slurm_rlhf.config.schema import Data\n"
        "from slurm_rlhf.rewards.reasoning_gym import task_rows\n"
        f"data = Data(reasoning_gym={NAMES!r}, max_samples=7, input_key='question', label_key='answer')\n"
        "print(json.dumps([row for _, row in task_rows(data)]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True, env=env)
    assert json.loads(done.stdout) == rows
    other = Data(reasoning_gym=NAMES, reasoning_gym_seed=1, max_samples=7, input_key="question", label_key="answer")
    assert [row for _, row in task_rows(other)] != rows


def test_an_unknown_task_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"reasoning-gym has no task 'basic_aritmetic'.*basic_arithmetic.*gcd"):
        list(task_rows(Data(reasoning_gym="basic_aritmetic")))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym.*slurm_rlhf\[rewards\]"):
        list(task_rows(Data(reasoning_gym="gcd")))

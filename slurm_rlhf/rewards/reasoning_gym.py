"""Make tasks of reasoning-gym for `data.reasoning_gym`, and score answers to them.

Tasks are made by a process of its own, `python -m slurm_rlhf.rewards.reasoning_gym NAMES SEED COUNT`: the library is
heavy, and some of its tasks depend on the order of sets, which PYTHONHASHSEED fixes there. So the same keys give the
same rows, also when a run is resumed.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

from slurm_rlhf.config.schema import Data
from slurm_rlhf.errors import ConfigError, RewardError, meant
from slurm_rlhf.rewards.items import Item, last_turn
from slurm_rlhf.wire import timeouts

KEY = "data.reasoning_gym"
TASK, ENTRY = "reasoning_gym_task", "reasoning_gym_entry"
"""Columns of a row: the task's name, and the library's own entry as Python text, which keeps its tuples."""
ALL = 5000
"""Number of rows where data.max_samples is 0; the library could make any number."""
MISSING = (
    f"{KEY} needs the package reasoning-gym, which is not installed: pip install 'slurm_rlhf[rewards]' (or pip "
    "install reasoning-gym)"
)


def task_rows(data: Data) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (position for errors, row) with question and answer in the columns that `data` names.

    The tasks take turns. Raises ConfigError for an unknown task, and if the library is not installed.
    """
    if find_spec("reasoning_gym") is None:
        raise ConfigError(MISSING)
    words = [data.reasoning_gym, str(data.reasoning_gym_seed), str(data.max_samples or ALL)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, *words],
            capture_output=True,
            text=True,
            timeout=timeouts.TASKS_S,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": "0", "MPLBACKEND": "agg"},
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{KEY} = {data.reasoning_gym!r}: {words[2]} tasks were not made within {timeouts.TASKS_S:g} s: some take "
            "seconds each. Lower data.max_samples, or name other tasks"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(f"{KEY} = {data.reasoning_gym!r}: {said[-1]}")
    for number, line in enumerate(done.stdout.splitlines()):
        question, answer, name, entry = json.loads(line)
        row = {data.input_key: question, data.label_key: answer, TASK: name, ENTRY: entry}
        yield f"{KEY}, {name}, task {number}", row


def task_score(item: Item) -> float:
    """Score a response by the scorer of its row's task, 0 to 1; the text in <answer> tags counts, else all of it.

    Raises RewardError for a row without a task, and whatever the library raises.
    """
    row = item["row"]
    if missing := [column for column in (TASK, ENTRY) if column not in row]:
        raise RewardError(
            f"reward.preset = reasoning_gym: the row has no column {missing[0]!r}, which {KEY} gives it (columns: "
            f"{', '.join(row)}): set {KEY}, or choose another reward"
        )
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(last_turn(item))
    answer = last_turn(item).strip() if answer is None else answer
    return float(_scorer(row[TASK])(answer, ast.literal_eval(row[ENTRY])))


@cache
def _scorer(name: str) -> Callable[[str, Any], float]:
    """Return a task's scorer. Making one reads the task's word lists, which takes longer than a score."""
    from reasoning_gym import get_score_answer_fn

    found: Callable[[str, Any], float] = get_score_answer_fn(name)
    return found


def main(names: str, seed: int, count: int) -> None:
    """Print a line for each of `count` tasks: question, answer, the task's name, its entry."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    chosen = [name.strip() for name in names.split(",") if name.strip()]
    known = sorted(DATASETS.keys() - {"composite"})  # a mixture of others
    for name in chosen:
        if name not in known:
            sys.exit(f"reasoning-gym has no task {name!r}{meant(name, known)} (tasks: {', '.join(known)})")
    sets = [create_dataset(name, seed=seed, size=-(-count // len(chosen))) for name in chosen]
    for number in range(count):
        place, turn = divmod(number, len(chosen))
        entry = sets[turn][place]
        print(json.dumps([entry["question"], entry["answer"], chosen[turn], repr(entry)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Rewards by workers: the responses whose reward fails are known, and all others are scored."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled_responses import sampled
from waiting import HANG_S, scaled

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, RewardError
from slurm_rlhf.rewards import function
from slurm_rlhf.rewards.function import register_reward
from slurm_rlhf.rewards.scored import Rewards, Scoring
from slurm_rlhf.rewards.sources import close_source, reward_source

BODY = """
import ctypes, os, time

def reward_func(responses, labels):
    answers = []
    for response in responses:
        if response == "hang":
            time.sleep(1000)
        if response == "crash":
            ctypes.string_at(0)
        if response == "grow":
            held = [b"x" * (1 << 20) for _ in range(600)]
            time.sleep(1000)
        if response == "raise":
            raise ValueError("no")
        answers.append({"nan": float("nan"), "text": "good"}.get(response, len(response)))
    return answers
"""
Run = Callable[..., Rewards]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Score responses with `BODY`, or another file, in workers."""
    sources: list[Any] = []
    notes: list[str] = []

    def scored(responses: list[str], per_prompt: int = 1, body: str = BODY, **keys: Any) -> Rewards:
        config = Config()
        (tmp_path / "reward.py").write_text(body)
        config.reward.remote_url = str(tmp_path / "reward.py")
        config.timeout.reward = HANG_S
        for name, value in keys.items():
            group, _, key = name.partition("__")
            setattr(getattr(config, group), key, value)
        log = tmp_path / "reward.log"
        source = reward_source(config, log)
        sources.append(source)
        found = Scoring(source, config.timeout.reward, log, notes.append)(*sampled(responses, per_prompt), 3)
        (tmp_path / "notes").write_text("\n".join(notes))
        return found

    yield scored
    for source in sources:
        close_source(source)


def test_a_function_runs_in_workers_with_the_same_rewards(run: Run) -> None:
    found = run(["a", "bb", "ccc", "dddd"], 2)
    assert found.rewards.tolist() == [1, 2, 3, 4]
    assert found.failed is found.skipped is None


BAD = ["a", "hang", "bb", "crash", "ccc", "raise", "grow", "nan", "text", "dd"]
KINDS = ["", "late", "", "ended", "", "raised", "memory", "raised", "raised", ""]
SHORT = {"timeout__reward": scaled(4.0), "reward__memory_mb": 300}  # it grows before it is late


@pytest.mark.parametrize("per_prompt", [1, 5])
@pytest.mark.slow
def test_a_number_takes_the_place_of_each_reward_that_fails(run: Run, tmp_path: Path, per_prompt: int) -> None:
    found = run(BAD, per_prompt, reward__on_error=-0.5, **SHORT)
    assert [why.partition(":")[0] for why in found.failed.tolist()] == KINDS
    assert found.failed[5].endswith("reward.py:15: reward_func raised ValueError: no")
    assert found.rewards.tolist() == [1, -0.5, 2, -0.5, 3, -0.5, -0.5, -0.5, -0.5, 2]
    log = (tmp_path / "reward.log").read_text()
    for response, kind in zip(BAD, KINDS, strict=True):
        assert (f"\n  response: {response!r}\n" in log) is bool(kind)
    note = (tmp_path / "notes").read_text()
    assert "step 3: the rewards of 6 of 10 responses failed (1 ended, 1 late, 1 memory, 3 raised)" in note


def test_skipped_responses_are_marked(run: Run) -> None:
    found = run(["a", "raise", "bb"], reward__on_error="skip")
    assert found.skipped.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("response", "stated"),
    [
        pytest.param("hang", "reward.py: reward_func: answer did not return within", marks=pytest.mark.slow),
        ("crash", "reward.py: reward_func: its process was killed by SIGSEGV"),
        ("raise", "reward.py:15: reward_func raised ValueError: no"),
        ("nan", "returned nan (float) at index 0; expected a finite number"),
        ("text", "returned 'good' (str) at index 0; expected a number"),
    ],
)
def test_fail_ends_with_one_line_that_names_the_response(run: Run, response: str, stated: str) -> None:
    with pytest.raises(RewardError) as failed:
        run(["a", response], 2, **SHORT)
    assert stated in str(failed.value)
    assert f"for the prompt 'p0' and the response {response!r}" in str(failed.value)
    assert "\n" not in str(failed.value)


def test_rewards_that_all_fail_end_the_run_whatever_the_key_says(run: Run) -> None:
    with pytest.raises(RewardError, match=r"the rewards of 2 of 2 responses failed \(2 raised\)"):
        run(["raise", "raise"], reward__on_error=0.0)


def test_too_few_rewards_are_an_error_of_the_function(run: Run) -> None:
    with pytest.raises(RewardError, match="1 rewards for 2 responses"):
        run(["a", "b"], 2, "def reward_func(responses):\n    return [1]\n", reward__on_error=0.0)


def test_scores_and_components_of_a_failed_response_are_filled(run: Run) -> None:
    body = "def reward_func(responses):\n    return {'rewards': [int(r) for r in responses], 'scores': [1], "
    found = run(["1", "x"], 1, body + "'components': {'a': [2]}}\n", reward__on_error=-1)
    assert found.scores.tolist() == [1, 0]
    assert found.components["a"].tolist() == [2, -1]


def test_a_file_that_cannot_be_loaded_is_one_line(run: Run) -> None:
    with pytest.raises(RewardError, match=r"reward.py:1: cannot be imported: ModuleNotFoundError") as failed:
        run(["a"], 1, "import no_such_module\n")
    assert "\n" not in str(failed.value)


def test_a_value_that_a_preset_does_not_take_leaves_no_traceback(run: Run, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    with pytest.raises(RewardError, match=r"missing.json is no file with a JSON schema"):
        run(["a"], reward__remote_url="", reward__preset="json_schema", reward__preset_value=missing)
    assert "Traceback" not in (tmp_path / "reward.log").read_text()


@pytest.mark.slow
def test_a_thousand_responses_of_which_one_in_fifty_ends_its_worker(run: Run) -> None:
    """1 % hang and 1 % crash. They stand together, as each needs a new process."""
    bad = ["hang", "crash"] * 10
    responses = bad + ["x" * (n % 7) for n in range(980)]
    found = run(responses, 20, timeout__reward=scaled(0.4), reward__on_error=-1.0, reward__workers=4)
    expected = ["late", "ended"] * 10 + [""] * 980
    assert [why.partition(":")[0] for why in found.failed.tolist()] == expected
    assert found.rewards.tolist() == [-1.0] * len(bad) + [float(len(text)) for text in responses[len(bad) :]]


def test_a_function_of_a_script_runs_in_workers_or_by_name_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers import it from its module; one of the script itself they have not, and the error says what to write."""
    monkeypatch.setattr(function, "_REGISTERED", {})
    (tmp_path / "my_rewards.py").write_text(
        "import os\n\ndef pid(responses):\n    return [float(os.getpid())] * len(responses)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config, (prompts, found) = Config(), sampled(["a", "b"], 2)
    config.reward.function, config.reward.workers = "pid", 1
    register_reward(importlib.import_module("my_rewards").pid)
    source = reward_source(config)
    try:
        assert source(prompts, found).rewards[0] not in (0, np.float32(os.getpid()))
    finally:
        close_source(source)
    register_reward(lambda responses: [float(os.getpid())] * len(responses), "pid", replace=True)
    with pytest.raises(ConfigError, match=r"pid is defined in the script .* or set config\.reward\.workers = 0"):
        reward_source(config)
    config.reward.workers = 0
    here = reward_source(config)
    assert here(prompts, found).rewards.tolist() == [np.float32(os.getpid())] * 2

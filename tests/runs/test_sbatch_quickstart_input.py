"""Inputs of the quickstart: its configurations, its data, its model and its reward function."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sampled_responses import IDS, response
from waiting import HANG_S

from slurm_rlhf.config.check import reward_source
from slurm_rlhf.config.load import load_config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.items import items_of
from slurm_rlhf.rewards.presets import Preset

MARKS_OF_FIXTURES = {"written": "slow"}
SBATCH = Path(__file__).resolve().parents[2] / "sbatch"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("input")
    subprocess.run([sys.executable, SBATCH / "quickstart_data.py", directory], check=True, timeout=HANG_S)
    return directory


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def summands(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in row["input"].removesuffix("=").split("+")))


def test_no_problem_is_in_two_files_or_twice(written: Path) -> None:
    problems = [summands(row) for name in ("sft", "train", "eval") for row in rows(written / f"{name}.jsonl")]
    assert len(problems) == len(set(problems))
    assert len(rows(written / "eval.jsonl")) >= 512


def test_labels_are_right_and_demonstrations_careless_about_one_carry(written: Path) -> None:
    for name in ("train", "eval"):
        assert all(int(row["label"]) == sum(summands(row)) for row in rows(written / f"{name}.jsonl"))
    missing = [sum(summands(row)) - int(row["output"]) for row in rows(written / "sft.jsonl")]
    carries = [sum(number % 10 for number in summands(row)) >= 10 for row in rows(written / "sft.jsonl")]
    assert set(missing) == {0, 10}
    assert not any(error and not carry for error, carry in zip(missing, carries, strict=True))
    assert sum(map(bool, missing)) / sum(carries) == pytest.approx(0.8, abs=0.02)


def test_the_model_is_a_tied_qwen2_of_a_million_parameters(written: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(written / "untrained")
    assert model.config.model_type == "qwen2"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    tokenizer = AutoTokenizer.from_pretrained(written / "untrained")
    ids = tokenizer("123+456=579")["input_ids"]
    assert len(ids) == 11
    assert tokenizer.decode(ids) == "123+456=579"


def test_the_reward_is_one_for_the_right_sum_alone() -> None:
    texts = ["919", "91", "9190", "", "909"]
    function = RewardFunction.load(str(SBATCH / "quickstart_reward.py"))
    asked = answered([{"input": "237+682=", "label": "919"}] * len(texts), texts)
    assert function(*asked).rewards.tolist() == [1, 0, 0, 0, 0]


@pytest.mark.slow
def test_a_task_of_reasoning_gym_has_questions_a_guessing_pupil_and_its_own_scorer(tmp_path: Path) -> None:
    words = [sys.executable, SBATCH / "quickstart_task.py", tmp_path]
    subprocess.run([*words, "spell_backward"], check=True, timeout=HANG_S)
    evaluated, shown = rows(tmp_path / "eval.jsonl"), rows(tmp_path / "sft.jsonl")
    reward = Preset("reasoning_gym", "")
    items = items_of(*answered(evaluated, [row["label"] for row in evaluated]))
    assert reward.answer(items, 1)["rewards"] == [1.0] * len(evaluated)
    right = [row["output"] == row["input"].rpartition(" ")[2][::-1] for row in shown]
    assert sum(right) / len(right) == pytest.approx(0.4, abs=0.02)
    config = load_config([SBATCH / "quickstart.toml", tmp_path / "task.toml"])
    assert (config.data.reasoning_gym, config.reward.preset) == ("spell_backward", "reasoning_gym")
    assert (config.data.prompt_dataset, config.reward.remote_url) == ("", "")
    assert list(reward_source(config)) == []
    sft = load_config([SBATCH / "quickstart_sft.toml", tmp_path / "sft.toml"])
    assert (sft.sft.output_dir, sft.data.max_len) == (config.actor.model_name_or_path, config.data.max_len)
    tokenizer = Tokenizer.load(tmp_path / "untrained")
    texts = [f"{row['input']}\n{row['output']}" for row in shown]
    assert max(map(len, tokenizer.encode_batch(texts))) < config.data.max_len  # and the token that ends it


@pytest.mark.slow
def test_a_task_that_is_unknown_is_one_line(tmp_path: Path) -> None:
    words = [sys.executable, str(SBATCH / "quickstart_task.py"), str(tmp_path), "spel_backward"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "did you mean spell_backward?" in done.stderr


def answered(found: list[dict[str, Any]], texts: list[str]) -> tuple[list[Prompt], list[Trajectory]]:
    prompts = [Prompt(n, row["input"], IDS, row["label"], row) for n, row in enumerate(found)]
    return prompts, [response(n, text) for n, text in enumerate(texts)]

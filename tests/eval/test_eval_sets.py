"""The data sets of an evaluation as they are read, sampled and scored; engines and rewards are the test's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_tiny

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError
from slurm_rlhf.eval.responses import ScoredResponse
from slurm_rlhf.eval.sets import Evaluation, read_eval_sets
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.function import Rewards
from slurm_rlhf.rewards.model import Scoring

FILES = {
    "sums": [{"input": f"{n}+1=", "label": str(n + 1), "part": "odd" if n % 2 else "even"} for n in range(6)],
    "words": [{"question": f"say {n}", "answer": n} for n in range(3)],
}
TEXT = """
[data]
max_len = 64
[rollout]
max_new_tokens = 8
[[eval.datasets]]
path = "sums.jsonl"
source_key = "part"
[[eval.datasets]]
path = "sums.jsonl"
name = "sampled"
temperature = 1.0
n_samples_per_prompt = 2
[[eval.datasets]]
path = "words.jsonl"
input_key = "question"
label_key = "answer"
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model") / "model"
    make_tiny(directory, tied=True)
    return Tokenizer.load(str(directory))


def config_of(tmp_path: Path, text: str = TEXT) -> Config:
    for name, rows in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml")


def test_data_sets_that_are_sampled_alike_go_to_the_engines_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    asked: list[tuple[int, float, int]] = []

    def sample(prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        asked.append((len(prompts), sampling.temperature, version))
        assert len({prompt.index for prompt in prompts}) == len(prompts)  # engines know requests by it
        one, mask = np.zeros(1, np.float32), np.ones(1, np.bool_)
        ids = np.ones(1, np.int32)
        return [
            Trajectory(prompt.index, number, prompt.token_ids, ids, one, mask, "stop", f"{prompt.text}{number}", [])
            for prompt in prompts
            for number in range(sampling.n)
        ]

    def reward(prompts: list[Prompt], found: list[Trajectory], step: int) -> Rewards:
        assert [prompt.text for prompt in prompts] == [one.text[:-1] for one in found]
        right = np.array([one.text.endswith("0") for one in found], np.float32)
        return Rewards(right * 2, right)

    config = config_of(tmp_path)
    sets = read_eval_sets(config, tokenizer)
    assert [len(one.prompts) for one in sets] == [6, 6, 3]
    assert [prompt.label for prompt in sets[2].prompts] == [0, 1, 2]
    scoring = Scoring(reward, 5.0)  # type: ignore[arg-type]
    found = Evaluation(config, sets, tmp_path / "eval", sample, scoring).run(3, 7)
    assert asked == [(9, 0.0, 7), (6, 1.0, 7)]
    assert found.metrics["eval/sums/mean"] == 1.0
    assert found.metrics["eval/sampled/mean"] == 0.5
    assert found.metrics["eval/sampled/pass@2"] == 1.0
    assert found.metrics["eval"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert [part.name for part in found.reports[0].sources] == ["even", "odd"]
    lines = (tmp_path / "eval" / "step_000003.jsonl").read_text().splitlines()
    kept = [ScoredResponse(**json.loads(line)) for line in lines]
    assert [(one.dataset, one.index, one.sample) for one in kept[6:10]] == [
        *(("sampled", 0, 0), ("sampled", 0, 1), ("sampled", 1, 0), ("sampled", 1, 1))
    ]
    assert (kept[0].source, kept[0].reward, kept[0].score) == ("even", 2.0, 1.0)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ('source_key = "part"', 'source_key = "prat"', "row 0 has no column 'prat' (columns: input, label, part)"),
        ('label_key = "answer"', 'label_key = "anwser"', "set label_key of the data set 'words' to a column"),
        (
            'input_key = "question"',
            'input_key = "input"',
            "words.jsonl:1: no column 'input' (columns: question, answer",
        ),
    ],
)
def test_a_column_that_is_missing(tmp_path: Path, tokenizer: Tokenizer, before: str, after: str, told: str) -> None:
    with pytest.raises(DataError) as raised:
        read_eval_sets(config_of(tmp_path, TEXT.replace(before, after)), tokenizer)
    assert told in str(raised.value)

"""The data sets of an evaluation: what entries inherit, the names of metrics, and every mistake in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.config.evaluation import data_sets, default_pass_k, eval_problems, metric_names
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

TWO = """
[data]
label_key = "answer"
[eval]
temperature = 0.6
n_samples_per_prompt = 8
answer_pattern = '#### (.*)'
[[eval.datasets]]
path = "gsm8k.jsonl"
source_key = "part"
[[eval.datasets]]
path = "sums.jsonl"
name = "sums-greedy"
temperature = 0
n_samples_per_prompt = 1
label_key = "label"
max_samples = 64
"""


def config_of(tmp_path: Path, text: str, *overrides: str) -> Config:
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml", overrides)


def test_entries_inherit_what_they_do_not_say(tmp_path: Path) -> None:
    first, second = data_sets(config_of(tmp_path, TWO))
    assert (first.name, first.path) == ("gsm8k", str(tmp_path / "gsm8k.jsonl"))
    assert (first.temperature, first.n_samples_per_prompt, first.pass_k) == (0.6, 8, (1, 2, 4, 8))
    assert (first.label_key, first.needs_label, first.source_key) == ("answer", False, "part")
    assert (second.name, second.temperature, second.n_samples_per_prompt) == ("sums-greedy", 0.0, 1)
    assert (second.label_key, second.needs_label, second.max_samples) == ("label", True, 64)
    assert second.answer_pattern == "#### (.*)"


def test_the_key_for_one_data_set_still_means_what_it_meant(tmp_path: Path) -> None:
    (only,) = data_sets(config_of(tmp_path, '[eval]\ndataset = "my eval.jsonl"\nmax_samples = 5\n'))
    assert (only.name, only.path, only.max_samples) == ("my_eval", str(tmp_path / "my eval.jsonl"), 5)
    assert (only.temperature, only.n_samples_per_prompt, only.pass_k) == (0.0, 1, (1,))
    assert data_sets(Config()) == []


def test_paths_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = load_config(None, ["--eval.datasets", "a.jsonl", "b.jsonl"])
    assert [one.path for one in data_sets(listed)] == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    mixed = load_config(None, ['--eval.datasets=["a.jsonl", {path = "b.jsonl", pass_k = [1]}]'])
    assert [one.name for one in data_sets(mixed)] == ["a", "b"]


def test_metrics_of_which_more_is_better(tmp_path: Path) -> None:
    gsm8k = [f"eval/gsm8k/{figure}" for figure in ("mean", "pass@1", "pass@2", "pass@4", "pass@8", "maj@8")]
    sums = ["eval/sums-greedy/mean", "eval/sums-greedy/pass@1"]
    assert metric_names(config_of(tmp_path, TWO)) == ["eval", *gsm8k, *sums]
    assert metric_names(Config()) == []
    assert [default_pass_k(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("entry", "stated"),
    [
        ("temprature = 1", "an entry has no 'temprature'; did you mean temperature? (valid: path, name,"),
        ("temperature = 'hot'", "eval.datasets: temperature takes a number, got 'hot'"),
        ("pass_k = [1.5]", "eval.datasets: pass_k takes a list of whole numbers, got [1.5]"),
    ],
)
def test_an_entry_that_cannot_be_read(tmp_path: Path, entry: str, stated: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(tmp_path, f"[[eval.datasets]]\npath = 'a.jsonl'\n{entry}\n")
    assert stated in str(raised.value)
    with pytest.raises(ConfigError, match="a data set has no path: name its JSONL file"):
        config_of(tmp_path, "[[eval.datasets]]\nname = 'a'\n")
    with pytest.raises(ConfigError, match="and of tables with path, name"):
        config_of(tmp_path, "[eval]\ndatasets = [3]\n")


def test_all_that_is_wrong_with_a_data_set_is_reported() -> None:
    entry = '{path="a.jsonl", n_samples_per_prompt=0, temperature=3, max_samples=-1, input_key=""}'
    problems = list(eval_problems(load_config(None, [f"--eval.datasets=[{entry}]"])))
    assert len(problems) == 5
    assert "eval.datasets, a: temperature must be at least 0 and at most 2, got 3" in problems


def test_what_is_right_is_left_alone(tmp_path: Path) -> None:
    right = config_of(tmp_path, TWO, "--ckpt.best_metric=eval/gsm8k/maj@8", "--eval.overlap", "--eval.steps=5")
    assert list(eval_problems(right)) == []
    assert list(eval_problems(Config())) == []

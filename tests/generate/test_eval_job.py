"""`slurm-rlhf eval` before an engine starts: its rows, and what is wrong said in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from training_runs import workspace

from slurm_rlhf.cli import main as cli
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ModelError
from slurm_rlhf.eval.sets import read_eval_sets
from slurm_rlhf.generate.job import EvalJob
from slurm_rlhf.generate.model_source import Source
from slurm_rlhf.generate.rows import PendingRows, Scores
from slurm_rlhf.records import Prompt, Sampling

SETS = """datasets = [
  { path = "eval.jsonl", name = "greedy" },
  { path = "eval.jsonl", name = "sampled", temperature = 1.0, n_samples_per_prompt = 2, source_key = "label" },
]"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = workspace(tmp_path_factory.mktemp("eval"))
    made.write_text(made.read_text().replace('dataset = "eval.jsonl"', SETS))
    return made


def job_of(config: Config, model: Path) -> EvalJob:
    return EvalJob(config, Source(model), read_eval_sets(config, Tokenizer.load(model)), model.parent)


def test_rows_of_all_data_sets_are_numbered_through_and_come_back(file: Path) -> None:
    config = load_config(file)
    rows = job_of(config, file.parent / "model")
    made = rows._rows(file.parent / "model")
    prompts, how = made.prompts(range(48)), made.sampling
    assert [prompt.index for prompt in prompts] == list(range(48)) == list(how)
    assert (how[23].n, how[23].temperature, how[24].n, how[24].temperature) == (1, 0.0, 2, 1.0)
    lines = [
        {"row": 24, "sample": 1, "response": "7", "score": 1.0, "tokens": 2, "finish_reason": "stop", "engine": 3},
        {"row": 24, "sample": 0, "response": None, "score": None, "error": "it did not fit"},
        {"row": 0, "sample": 0, "response": "5", "score": None, "error": "score nan"},
    ]
    greedy, sampled = rows.responses(lines)
    assert [(one.dataset, one.index, one.score, one.error) for one in greedy] == [("greedy", 0, 0.0, "score nan")]
    assert [(one.index, one.sample, one.score, one.answer) for one in sampled] == [(0, 0, 0.0, None), (0, 1, 1.0, "7")]
    assert sampled[1].source == sampled[1].label == rows.sets[1].prompts[0].row["label"]


def test_an_engine_is_asked_for_each_row_as_its_data_set_says(file: Path) -> None:
    asked: list[tuple[int, int, float]] = []

    def ask(engine: int, prompt: Prompt, sampling: Sampling) -> None:
        asked.append((prompt.index, sampling.n, sampling.temperature))

    config = load_config(file)
    rows = job_of(config, file.parent / "model")._rows(file.parent / "model")
    config.vllm.max_num_seqs = 8
    PendingRows(config, rows.prompts(range(48)), rows.sampling, Scores(None), set()).feed(ask, 0, 2, 0.0)
    assert len(asked) == 5  # each may have two responses, and the engine takes eight and two more
    asked.clear()
    config.vllm.max_num_seqs = 1000
    pending = PendingRows(config, rows.prompts(range(48)), rows.sampling, Scores(None), {(0, 0), (24, 0)})
    pending.feed(ask, 0, 1, 0.0)
    assert asked == [(row, 1 if row < 24 else 2, 0.0 if row < 24 else 1.0) for row in range(48)]
    assert pending._missing(0) == []
    assert pending._missing(24) == [1]
    assert pending._missing(25) == [0, 1]


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        ([], "--model is missing: name the model, run or checkpoint to evaluate"),
        (["--model"], "--model takes a value: what to evaluate"),
        (["--model", "--output=x"], "--model takes a value: what to evaluate"),
        (["--model=nowhere"], "nowhere is no Hugging Face directory (config.json), no run directory"),
        (["--model={model}", "--eval.datasets=/no.jsonl"], "eval.datasets, no: no such file: /no.jsonl"),
        (["--model={model}", "--eval.datasets=[]"], "there is nothing to evaluate: name JSONL files"),
        (["--model={model}", "--eval.pass_k=8"], "pass@8 needs k from 1 to n_samples_per_prompt = 1"),
        (["--model={model}", "--reward.remote_url="], "reward.remote_url is not set: name a Python file"),
        (["--model={model}", "--data.input_key=question"], "no column 'question' (columns: input, label)"),
        (["--model={model}", "--eval.source_key=part"], "has no column 'part' (columns: input, label)"),
        (["--model={model}", "--data.max_len=8192"], "of --model = "),
        (["--model={model}", "--rollout.engine=hf"], "rollout.engine = hf: rows are answered by engines only"),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_starts(
    file: Path, words: list[str], stated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(model=file.parent / "model") for word in words]
    assert cli.main(["eval", str(file), *given, f"--run_dir={file.parent / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert stated in said
    assert "generate.model_name_or_path" not in said
    assert not (file.parent / "run").exists()


def test_files_go_with_the_evaluations_of_the_run_or_where_they_are_reported(file: Path, tmp_path: Path) -> None:
    config = load_config(file, [f"--run_dir={tmp_path / 'run'}", "--generate.ordered=true", "--generate.logprobs=true"])
    shutil.copytree(file.parent / "model", tmp_path / "mine" / "final")
    job = EvalJob.prepare(config, tmp_path / "mine", None)
    assert not job.config.generate.ordered
    assert not job.config.generate.logprobs
    assert job.source.model == tmp_path / "mine" / "final"
    assert job.root == tmp_path / "run" / "eval" / "mine"  # nothing says that `mine` is a run
    (tmp_path / "mine" / "metrics.jsonl").touch()
    assert EvalJob.prepare(config, tmp_path / "mine", None).root == tmp_path / "mine" / "eval" / "mine"
    assert EvalJob.prepare(config, tmp_path / "mine" / "final", None).root == tmp_path / "mine" / "eval" / "final"
    assert EvalJob.prepare(config, tmp_path / "mine", tmp_path / "out").root == tmp_path / "out"
    with pytest.raises(ModelError, match=r"--model: .* is no Hugging Face directory"):
        EvalJob.prepare(config, tmp_path / "no", None)


def test_the_report_of_an_output(file: Path, tmp_path: Path) -> None:
    config = load_config(file, [f"--run_dir={tmp_path / 'run'}"])
    job = EvalJob.prepare(config, file.parent / "model", tmp_path / "out")
    (tmp_path / "out").mkdir()
    kinds = [(row, sample) for row in range(48) for sample in range(1 if row < 24 else 2)]
    lines = [
        {"row": row, "sample": sample, "response": "1", "score": float(sample or row < 6), "finish_reason": "stop"}
        for row, sample in reversed(kinds)
    ]
    (tmp_path / "out" / "output.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = job.report()
    assert found.metrics["eval/greedy/mean"] == 0.25
    assert found.metrics["eval/sampled/pass@1"] == 0.5
    assert found.metrics["eval/sampled/pass@2"] == 1.0
    written = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert written["eval"] == pytest.approx(0.375)
    assert written["model"] == str(file.parent / "model")
    assert len((tmp_path / "out" / "eval.jsonl").read_text().splitlines()) == 72


def test_its_help_has_its_options_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--model " in out
    assert "--output " in out
    assert cli.main(["eval", "--help", "eval"]) == 0
    assert "--eval.datasets PATH ..." in capsys.readouterr().out

"""`slurm-rlhf data`: what the model will see of prompts, examples and pairs, on the terminal and as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny

from slurm_rlhf.cli import data as command
from slurm_rlhf.cli.main import main


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f'"{path.name}"'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with the data sets of three commands."""
    make_tiny(tmp_path / "model")
    prompts = [{"input": f"{number}+1=", "label": str(number + 1), "level": number % 10} for number in (1, 12, 3, 1)]
    long = [{"input": "1" * 40, "label": "<b>"}, {"output": "no input", "label": "", "level": 0}]
    sft = [{"input": "1+1=", "output": "2", "level": 0}, {"input": "1" * 40, "output": "2", "level": 0}]
    pairs = [{"input": "1+1=", "chosen": "2", "rejected": "3", "level": 0}]
    config = tmp_path / "run.toml"
    config.write_text(
        f'[actor]\nmodel_name_or_path = "model"\n[rollout]\nmax_new_tokens = 4\n[data]\nmax_len = 16\n'
        f"prompt_dataset = {written(tmp_path / 'p.jsonl', prompts + [{**row, 'level': 0} for row in long])}\n"
        f"[sft]\ndataset = {written(tmp_path / 's.jsonl', sft)}\n"
        f"[dpo]\ndataset = {written(tmp_path / 'd.jsonl', pairs)}\n"
    )
    monkeypatch.chdir(tmp_path)
    return config


def test_it_shows_tokens_masks_lengths_and_what_is_left_out(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(file), "--data.filter=level<3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    prompts, examples = out.split("sft.dataset: ")
    examples, pairs = examples.split("dpo.dataset: ")
    for line in (
        "  3 prompts",
        "  duplicates: 1; 2 times: '1+1='",
        "  left out: 1 by data.filter",
        f"  {'4':>16} {'█' * 48} 2",
        f"  left out: 1 longer than 12 tokens (data.max_len - rollout.max_new_tokens): {file.parent}/p.jsonl:5",
        f"  left out: a run refuses it: {file.parent}/p.jsonl:6: no column 'input' (columns: output, label, level): "
        "fix the row or set data.input_key",
        "    1│+│1│=",
    ):
        assert line in prompts.splitlines()
    assert f"  left out: 1 longer than data.max_len = 16 tokens: {file.parent}/s.jsonl:2" in examples.splitlines()
    assert f"  {file.parent}/d.jsonl:1, answer 2 of 2, 6 tokens" in pairs.splitlines()
    assert "    1│+│1│=│[2]│[<eos>]" in examples.splitlines()
    assert "  2 of 6 tokens are in the loss" in examples.splitlines()
    both = [line.strip() for line in pairs.splitlines() if "│" in line]
    assert both == ["1│+│1│=│[2]│[<eos>]", "1│+│1│=│[3]│[<eos>]"]
    page = (file.parent / "data.html").read_text()
    assert '<span class="none">=</span><span class="loss">2</span>' in page
    assert max(map(float, re.findall(r'class="bar" style="width:([0-9.]+)%', page))) == 100
    assert "src=" not in page


@pytest.mark.slow
def test_it_shows_tasks_of_reasoning_gym_and_held_out_examples(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(file.parent / "model")
    words = ["--data.prompt_dataset=", "--sft.dataset=", "--dpo.dataset=", "--rm.eval_dataset=d.jsonl"]
    tasks = ["--data.reasoning_gym=basic_arithmetic,gcd", "--data.max_samples=3", "--data.max_len=4096"]
    assert main(["data", str(file), *words, *tasks, "--rows=3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["data.reasoning_gym: basic_arithmetic,gcd", "  3 prompts"]
    titles = [line.partition(", label")[0] for line in shown if "  data.reasoning_gym, " in line]
    names = ["basic_arithmetic, task 0", "gcd, task 1", "basic_arithmetic, task 2"]
    assert titles == [f"  data.reasoning_gym, {name}" for name in names]
    assert f"rm.eval_dataset: {file.parent}/d.jsonl" in shown


def test_it_shows_the_prompts_of_evaluations_by_their_own_columns(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(file.parent / "held.jsonl", [{"question": "2+2=", "answer": "4"}])
    file.write_text(file.read_text() + '[[eval.datasets]]\npath = "held.jsonl"\ninput_key = "question"\n')
    words = ["--data.prompt_dataset=", "--sft.dataset=", "--dpo.dataset=", "--data.filter=level<1"]
    assert main(["data", str(file), *words]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == [f"eval.datasets, held: {file.parent}/held.jsonl", "  1 prompts"]
    assert "    2│+│2│=" in shown


def test_the_page_escapes_what_data_say(file: Path) -> None:
    row = [{"input": "1+1=", "label": "<script>alert(1)</script>"}]
    written(file.parent / "p.jsonl", row)
    assert main(["data", str(file), "--output=page.html"]) == 0
    page = (file.parent / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_terminal_gets_colours(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True)
    assert main(["data", str(file), "--data.prompt_dataset=", "--dpo.dataset="]) == 0
    assert "\x1b[2m=\x1b[0m│\x1b[30;42m2\x1b[0m" in capsys.readouterr().out


def test_without_a_data_set_it_says_what_to_set(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(file), "--data.prompt_dataset=", "--dpo.dataset=", "--sft.dataset="]) == 2
    assert "no data set is named: set data.prompt_dataset" in capsys.readouterr().err
    assert main(["data", str(file), "--output=nowhere/x.html"]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_it_names_rows_that_a_stage_refuses_and_reads_held_out_ones_whole(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"input": "1+1=", "output": "2"}
    written(file.parent / "s.jsonl", [good, *[{"input": "1"}] * 7])
    written(file.parent / "held_out.jsonl", [good] * 3)
    words = ["--data.prompt_dataset=", "--dpo.dataset=", "--sft.eval_dataset=held_out.jsonl", "--data.filter=input!=2"]
    assert main(["data", str(file), *words, "--data.max_samples=2"]) == 0
    trained, held_out = capsys.readouterr().out.split("sft.eval_dataset: ")
    refused = f"  left out: a run refuses it: {file.parent}/s.jsonl:2: no column 'output' (columns: input)"
    assert [line.startswith(refused) for line in trained.splitlines()].count(True) == 1
    assert "  left out: 6 by max_samples" in trained.splitlines()
    assert "  3 examples" in held_out.splitlines()
    assert "left out" not in held_out
    assert main(["data", str(file), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "left out" in line][-1] == "  left out: and 2 more"
    assert "  1 examples" in lines
    assert main(["data", str(file), *words, "--data.filter=none=2"]) == 0
    assert "  0 examples" in capsys.readouterr().out.splitlines()

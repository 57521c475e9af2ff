"""`slurm-rlhf rm`: a reward model that learns which answer is preferred, is measured, and loads where it is used."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_runs import VLLM_ON_CPU, metrics, run
from tiny_models import make_reward, make_tiny

from slurm_rlhf.cli.main import main
from slurm_rlhf.config.check import check_stage, reward_statistics
from slurm_rlhf.config.model_directory import check_head
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, DataError, ModelError
from slurm_rlhf.stages.examples import Examples, load_judged, load_pairs
from slurm_rlhf.trainer.frozen import RewardModel

PAIR = {"input": "1+1=", "chosen": "2", "rejected": "13"}
VLLM = """
import json, sys
from vllm import LLM
llm = LLM(sys.argv[1], runner="pooling", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8)
found = llm.classify([{"prompt_token_ids": ids} for ids in json.load(open(sys.argv[2]))], use_tqdm=False)
print("SCORES " + json.dumps([score for each in found for score in each.outputs.probs]))
"""


def written(directory: Path, rows: list[Any], name: str = "pairs.jsonl") -> Path:
    file = directory / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_margin_is_the_number_of_both_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = written(tmp_path, [PAIR | {"margin": 1.5}, PAIR, PAIR | {"margin": None}])
    margins = load_pairs(file, tokenizer, Data(max_len=16), margins=True).experience.rewards.tolist()
    assert margins == [1.5, 1.5, 0, 0, 0, 0]
    assert not load_pairs(file, tokenizer, Data(max_len=16)).experience.rewards.any()
    for bad in ("much", float("nan"), [1]):
        with pytest.raises(DataError, match=r"pairs\.jsonl:1: 'margin' \(data\.margin_key\) must be a number"):
            load_pairs(written(tmp_path, [PAIR | {"margin": bad}]), tokenizer, Data(max_len=16), margins=True)


def judged_of(directory: Path, tokenizer: Tokenizer, *rows: Any) -> Examples:
    return load_judged(written(directory, list(rows)), tokenizer, Data(max_len=12))


def test_an_answer_with_a_label_stands_before_an_answer_to_another_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answers = [("11=", "a", True), ("2=", "b", False), ("3=", "c" * 9, True), ("4=", "d", 0)]
    rows = [{"input": prompt, "output": answer, "label": good} for prompt, answer, good in answers]
    found = judged_of(tmp_path, tokenizer, *rows)
    ids = [found.experience.select([row]).token_ids.tolist() for row in range(6)]
    texts = [tokenizer.decode(text, skip_special_tokens=False) for text in ids]
    assert texts == ["2=b<eos>", "2=d<eos>", "3=ccccccccc<eos>", "3=a<eos>", "4=d<eos>", "4=b<eos>"]
    assert found.experience.rewards.tolist() == [0, 0, 1, 1, 0, 0]
    assert (len(found), found.width) == (3, 2)
    assert [place.rpartition(":")[2] for place in found.places] == ["2", "3", "4"]
    assert [place.rpartition(":")[2] for place in found.dropped] == ["1"], "11= with the nine c is too long"


@pytest.mark.parametrize("label", ["true", 2, None])
def test_a_label_is_true_or_false(tmp_path: Path, tokenizer: Tokenizer, label: Any) -> None:
    row = {"input": "1", "output": "2", "label": label}
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: 'label' \(data\.label_key\) must be true or false, got"):
        judged_of(tmp_path, tokenizer, row)
    with pytest.raises(DataError, match=r"1 usable examples: KTO compares the answers of two"):
        judged_of(tmp_path, tokenizer, row | {"label": True})


def make_job(directory: Path, command: str = "rm", **keys: Any) -> None:
    make_tiny(directory / "model")
    rows = [
        {"input": f"{a}+{b}=", "chosen": "12", "rejected": "345", "margin": a % 2} for a in range(9) for b in range(4)
    ]
    written(directory, rows)
    written(directory, [{"input": f"{a}*", "chosen": "12", "rejected": "345"} for a in range(7)], "held_out.jsonl")
    given = {
        "dataset": "pairs.jsonl",
        "output_dir": "out",
        "batch_size": 12,
        "max_epochs": 4,
        "learning_rate": 2e-3,
    } | keys
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())
    (directory / "job.toml").write_text(
        '[actor]\nmodel_name_or_path = "model"\n[data]\nmax_len = 16\n[ds]\nparam_dtype = "fp32"\n'
        f"[train]\nmax_tokens_per_gpu = 64\nthreads_per_rank = 1\n[{command}]\nsave_steps = 5\n{lines}"
    )


def start(directory: Path, *words: str, command: str = "rm", ranks: int = 1) -> Any:
    """Train in this process, or in `ranks` of torchrun."""
    if ranks == 1:
        printed = io.StringIO()
        with contextlib.chdir(directory), contextlib.redirect_stdout(printed), patch.dict(os.environ, LOCAL_RANK="0"):
            code = main([command, "job.toml", *words])
        return subprocess.CompletedProcess([], code, printed.getvalue(), "")
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    return run([sys.executable, *launcher, "-m", "slurm_rlhf.cli", command, "job.toml", *words], directory, {})


def finished(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-3000:]


MARKS_OF_FIXTURES = {"trained": "slow"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rm")
    make_job(directory, eval_dataset="held_out.jsonl", eval_steps=2)
    done = start(directory)
    finished(done)
    assert re.search(r"rm: measured by 7 examples: loss 0\.\d+, accuracy 1\.0000, margin \d", done.stdout)
    return directory


def test_it_learns_what_is_preferred(trained: Path) -> None:
    rows = metrics(trained / "out.run")
    assert len(rows) == 12
    assert rows[-1]["loss"] < 0.3 < np.log(2) < rows[0]["loss"]
    assert (rows[-1]["preferred"], rows[-1]["eval/accuracy"]) == (1.0, 1.0)
    assert rows[-1]["eval/margin"] > 2
    assert 0 < rows[-1]["eval/calibration_error"] < 0.1
    assert [row["step"] for row in rows if "eval/loss" in row] == [2, 4, 6, 8, 10, 12]
    assert rows[-1]["eval/loss"] < 0.3 < rows[1]["eval/loss"] < 1


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("words", [(), ("--ds.param_dtype=bf16", "--lora.rank=4", "--rm.max_steps=2")])
def test_transformers_and_the_reward_role_give_the_scores_that_it_was_measured_by(
    trained: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    from transformers import AutoModelForSequenceClassification

    job = trained
    if words:
        job = tmp_path
        make_job(job, eval_dataset="held_out.jsonl")
        base = shutil.copytree(trained / "out", job / "base")
        with_bias = load_file(base / "model.safetensors") | {"score.bias": torch.ones(1)}  # it is dropped
        save_file(with_bias, base / "model.safetensors", {"format": "pt"})
        finished(start(job, *words, f"--actor.model_name_or_path={base}"))
    statistics = reward_statistics(str(job / "out"))
    config = Config()
    config.reward.model_name_or_path, config.data.max_len = str(job / "out"), 16
    config.ds.param_dtype = "bf16" if words else "fp32"
    held_out = load_pairs(job / "held_out.jsonl", Tokenizer.load(job / "out"), config.data).experience
    model = RewardModel(config)
    scores = model.score(held_out, [[row] for row in range(len(held_out))])
    assert (scores.mean(), scores.std()) == pytest.approx(
        statistics, rel=0.05 if words else 1e-4, abs=0.02 if words else 1e-5
    )
    if words:
        adapter, whole = (load_file(job / "out" / f"{name}.safetensors") for name in ("adapter/adapter_model", "model"))
        assert torch.equal(adapter["base_model.model.score.weight"], whole["score.weight"])
        assert "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in adapter
        return
    theirs = AutoModelForSequenceClassification.from_pretrained(job / "out", dtype="auto")
    assert theirs.config.num_labels == 1
    ends = held_out.token_offsets
    texts = [held_out.token_ids[ends[row] : ends[row + 1]].tolist() for row in range(len(held_out))]
    width = max(map(len, texts))
    ids = torch.tensor([text + [theirs.config.pad_token_id] * (width - len(text)) for text in texts])
    with torch.no_grad():
        logits = theirs(ids, attention_mask=(ids != theirs.config.pad_token_id).long()).logits[:, 0]
    np.testing.assert_allclose(logits.numpy(), scores, atol=1e-5)


@pytest.mark.engine
@pytest.mark.full  # it starts an engine for itself
def test_vllm_gives_the_scores_of_transformers(trained: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    tokenizer = Tokenizer.load(trained / "out")
    found = load_pairs(trained / "pairs.jsonl", tokenizer, Data(max_len=16)).experience
    given = [ids.tolist() for ids in np.split(found.token_ids, found.token_offsets[1:-1])]
    (trained / "given.json").write_text(json.dumps(given))
    scored = run([sys.executable, "-c", VLLM, "out", "given.json"], trained, VLLM_ON_CPU)
    finished(scored)
    theirs = AutoModelForSequenceClassification.from_pretrained(trained / "out", dtype="auto")
    with torch.no_grad():
        scores = [theirs(torch.tensor([ids])).logits.item() for ids in given]
    assert min(scores) < -1 < 1 < max(scores), "scores, no probabilities"
    assert json.loads(scored.stdout.split("SCORES ")[1].splitlines()[0]) == pytest.approx(scores, abs=1e-5)


@pytest.mark.slow
@pytest.mark.full  # its loss is checked in tests/algorithms
def test_kto_learns_from_answers_alone(tmp_path: Path) -> None:
    make_job(tmp_path, "dpo", loss_type="kto", dataset="judged.jsonl", batch_size=12, max_epochs=4, learning_rate=1e-3)
    rows = [
        {"input": f"{a}+{b}=", "output": "12" if good else "345", "label": good}
        for a in range(9)
        for b in range(4)
        for good in (bool((a + b) % 2),)
    ]
    written(tmp_path, rows, "judged.jsonl")
    held_out = ("--dpo.eval_dataset=judged.jsonl", "--dpo.eval_steps=4")
    finished(start(tmp_path, *held_out, command="dpo"))
    one = metrics(tmp_path / "out.run")
    measured = [row for row in one if "eval/loss" in row]
    assert [row["step"] for row in measured] == [4, 8, 12]
    assert measured[-1]["eval/loss"] < measured[0]["eval/loss"] < 0.5
    assert measured[-1]["eval/preferred"] == 1.0
    assert measured[-1]["eval/kto_kl"] == pytest.approx(one[-1]["kto_kl"], abs=9)
    assert (one[0]["loss"], one[0]["kto_kl"]) == (pytest.approx(0.5, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert one[-1]["loss"] < 0.45
    assert one[-1]["preferred"] == 1.0
    finished(start(tmp_path, *held_out, "--dpo.output_dir=three", command="dpo", ranks=3))
    (tmp_path / "out.run").rename(tmp_path / "one.run")
    (tmp_path / "three.run").rename(tmp_path / "out.run")
    for alone, three in zip(one, metrics(tmp_path / "out.run"), strict=True):
        assert three == pytest.approx(alone, rel=1e-4, abs=1e-5)


def checked(directory: Path, **changes: Any) -> Config:
    config = Config()
    config.actor.model_name_or_path = str(directory / "model")
    config.data.max_len, config.rollout.max_new_tokens = 64, 8
    for stage in (config.rm, config.dpo):
        stage.dataset, stage.output_dir = str(written(directory, [PAIR])), str(directory / "trained")
    for name, value in changes.items():
        setattr(config.dpo, name, value)
    return config


def test_check_sees_what_is_wrong_before_anything_is_loaded(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model")
    check_stage(checked(tmp_path), "rm")
    config = checked(tmp_path)
    config.rm.eval_dataset = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"rm\.eval_dataset: "):
        check_stage(config, "rm")
    config.rm.eval_dataset, config.rm.eval_steps = "", 3
    with pytest.raises(ConfigError, match=r"rm\.eval_steps needs rm\.eval_dataset: set it"):
        check_stage(config, "rm")
    with pytest.raises(ConfigError, match=r"dpo\.undesirable_weight = 2 has no effect with dpo\.loss_type = dpo"):
        check_stage(checked(tmp_path, undesirable_weight=2.0), "dpo")
    with pytest.raises(ConfigError, match=r"dpo\.label_smoothing = 0\.1 has no effect with dpo\.loss_type = kto"):
        check_stage(checked(tmp_path, label_smoothing=0.1, loss_type="kto"), "dpo")
    with pytest.raises(ConfigError, match=r"dpo\.simpo_gamma = 1 has no effect with dpo\.loss_type = ipo"):
        check_stage(checked(tmp_path, simpo_gamma=1.0, loss_type="ipo"), "dpo")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_encoder_decoder": True}))
    with pytest.raises(ModelError, match="has an encoder and a decoder: a decoder-only model is needed"):
        check_stage(checked(tmp_path), "rm")


def test_a_head_of_another_size_is_seen_in_the_header_of_its_file(tmp_path: Path) -> None:
    model = make_reward(tmp_path / "reward")
    check_head("reward.model_name_or_path", str(model), language=False)
    weights = load_file(model / "model.safetensors")
    for score in (torch.zeros(2, 64), torch.zeros(1, 32)):
        save_file(weights | {"score.weight": score}, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            ModelError, match=r"score\.weight has shape \[\d, \d\d\], not \[1, 64\]: a reward model gives one"
        ):
            check_head("reward.model_name_or_path", str(model), language=False)

"""`slurm-rlhf dpo`: pairs that are read, and a model that learns to prefer, also from a checkpoint and on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import saved_tokenizer
from stage_runs import metrics, run
from tiny_models import make_tiny

from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.examples import load_pairs
from slurm_rlhf.stages.kinds import DpoTrainer, KtoTrainer

PAIR = {"input": "1+1=", "chosen": "2", "rejected": "13"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return saved_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)


def pairs_of(directory: Path, tokenizer: Tokenizer, *rows: Any, **data: Any) -> Any:
    file = directory / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pairs(file, tokenizer, Data(**{"max_len": 16, **data}))


def test_a_pair_is_two_rows_and_a_long_one_is_dropped_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = pairs_of(tmp_path, tokenizer, PAIR, PAIR | {"rejected": "1" * 40}, PAIR | {"chosen": "9"})
    texts = []
    for row in range(len(found.experience)):
        one = found.experience.select([row])
        texts.append(tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=False))
    assert texts == ["1+1=2<eos>", "1+1=13<eos>", "1+1=9<eos>", "1+1=13<eos>"]
    assert (len(found), found.rows([1])) == (2, [2, 3])
    assert [place.rpartition(":")[2] for place in (*found.places, *found.dropped)] == ["1", "3", "2"]
    assert found.experience.response_lens.tolist() == [2, 3, 2, 3]
    assert found.lengths(found.experience, packed=True) == [13, 13]
    assert found.lengths(found.experience, packed=False) == [14, 14]


def test_messages_hold_the_prompt_or_stand_behind_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    said = (("user", "1?"), ("assistant", "2"), ("assistant", "3"))
    asked, yes, no = ({"role": role, "content": text} for role, text in said)
    whole = {"chosen": [asked, yes], "rejected": [asked, no]}
    behind = {"input": [asked], "chosen": [yes], "rejected": [no]}
    tokens = [
        pairs_of(tmp_path, tokenizer, row, apply_chat_template=True).experience.token_ids.tolist()
        for row in (whole, behind)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input": "1", "chosen": "2"}, r"pairs\.jsonl:1: no column 'rejected' .*data.rejected_key"),
        (PAIR | {"rejected": "2"}, "the chosen answer equals the rejected one"),
        (PAIR | {"chosen": 2}, "'chosen' must be a text, or a list of messages"),
        (PAIR | {"chosen": []}, "'chosen' must be a text, or a list of messages"),
        ({"chosen": "2", "rejected": "3"}, r"no column 'input' .*not the same prompt before both"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        pairs_of(tmp_path, tokenizer, row)


def test_losses_and_metrics_of_pairs_and_of_judged_answers() -> None:
    """Answers whose log-ratios to the reference are 1, -3, 1, 7; the odd ones tell KTO how far it is: 2."""
    lens, ids, mask = np.array([2, 1, 1, 2], np.int32), np.arange(10, dtype=np.int32), np.ones(6, np.bool_)
    part = Experience(np.ones(4, np.int32), lens, ids, mask, np.array([1, 0, 0, 1], np.float32))
    part.columns["ref_logprobs"] = np.array([-2, -2, -1, -4, -4, -6], np.float32)
    logprobs = torch.tensor([-1.0, -2, -4, -3, -1, -2])
    found = []
    for kind in (DpoTrainer, KtoTrainer):
        trainer: Any = kind.__new__(kind)
        trainer.config = Config()
        trainer.config.dpo.beta, trainer.config.dpo.desirable_weight = 0.5, 1.5
        found.append({name: float(value) for name, value in trainer._of_whole(part, logprobs).items()})
    loss = np.log1p(np.exp(-2)) + np.log1p(np.exp(3))
    stated = {"loss": loss, "preferred": 1, "margin": -1, "chosen_logprobs": -6, "rejected_logprobs": -7}
    assert found[0] == pytest.approx(stated)
    loss = 1.5 / (1 + np.exp(-0.5)) + 1 / (1 + np.exp(0.5))
    assert found[1] == pytest.approx({"loss": loss, "kto_kl": 4, "preferred": 1, "margin": 0})


def make_job(directory: Path) -> None:
    (directory / "slurm-rlhf").write_text("import sys\nfrom slurm_rlhf.cli.main import main\nsys.exit(main())\n")
    make_tiny(directory / "model")
    rows = [{"input": f"{a}+{b}=", "chosen": "12", "rejected": "345"} for a in range(8) for b in range(4)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:-1], rows[0]]))
    (directory / "job.toml").write_text(
        '[actor]\nmodel_name_or_path = "model"\n[data]\nmax_len = 16\n[ds]\nparam_dtype = "fp32"\n'
        '[train]\nmax_tokens_per_gpu = 64\n[dpo]\ndataset = "pairs.jsonl"\noutput_dir = "out"\nbatch_size = 8\n'
        'max_epochs = 3\nlearning_rate = 1e-3\nlr_scheduler = "linear"\nsave_steps = 7\n'
    )


def dpo(directory: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, *launcher, str(directory / "slurm-rlhf"), "dpo", "job.toml", *words], directory, {})


MARKS_OF_FIXTURES = {"trained": "slow"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dpo")
    make_job(directory)
    done = dpo(directory)
    assert done.returncode == 0, done.stderr
    assert "dpo: computing the reference's log-probs of 32 examples, once" in done.stdout
    assert "dpo: warning: examples that are equal to earlier ones: 1 (`slurm-rlhf data` shows" in done.stdout
    return directory


def test_it_learns_to_prefer(trained: Path) -> None:
    rows = metrics(trained / "out.run")
    assert len(rows) == 12
    assert (rows[0]["margin"], rows[0]["loss"]) == (pytest.approx(0, abs=1e-5), pytest.approx(np.log(2), abs=1e-5))
    assert rows[-1]["preferred"] == 1.0
    assert rows[-1]["margin"] > 0.5
    assert [row["lr"] for row in rows] == pytest.approx(np.linspace(1e-3, 1e-4, 12))  # to actor.lr_min_ratio
    assert (trained / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    "words", [pytest.param(("--ds.zero_stage=3",), marks=pytest.mark.full), ("--dpo.loss_type=orpo", "--lora.rank=4")]
)
def test_two_ranks_do_what_one_does(trained: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    found = []
    for launcher in ((), ("-m", "torch.distributed.run", "--nproc_per_node=2")):
        directory = tmp_path / str(len(found))
        directory.mkdir()
        make_job(directory)
        script = directory / "slurm-rlhf"
        script.write_text(f"import atexit\natexit.register(print, 'teardown')\n{script.read_text()}")
        more = (
            f"--actor.model_name_or_path={trained / 'model'}",
            "--dpo.max_steps=3",
            "--dpo.eval_dataset=pairs.jsonl",
        )
        done = dpo(directory, *words, *more, launcher=launcher)
        assert done.returncode == 0, done.stderr
        assert not launcher or "teardown" not in done.stdout, (
            "threads of gloo abort it, if they still let go of a tensor"
        )
        found.append(metrics(directory / "out.run"))
    assert found[0][-1]["eval/loss"] < found[0][0]["loss"]
    for one, two in zip(*found, strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-5)

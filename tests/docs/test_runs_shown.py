"""Commands of the pages that start a run, run as they stand, with the tests' files and small sizes behind the words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from programs import completed
from shown_commands import ROOT, shown
from training_runs import workspace

pytestmark = [pytest.mark.full]

FEW = ("--train.max_steps=2", "--eval.dataset=", "--train.full_determinism=false")
SMALL = (
    *("--data.max_len=64", "--data.apply_chat_template=false", "--rollout.max_new_tokens=8", "--vllm.max_num_seqs=16"),
    *("--rollout.n_samples_per_prompt=4", "--vllm.dtype=fp32"),
)


class Folder:
    """A user's directory: files of a run by the names that the pages use, and commands that run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = workspace(path).read_text()
        for name in ("mine.toml", "FILE.toml"):
            (path / name).write_text(f'run_dir = "runs/mine"\n{text}')
        (path / "sbatch").symlink_to(ROOT / "sbatch")

    def run(self, command: str, *sizes: str, **names: str) -> str:
        """Run a command that a page shows, with `names` in place of its words, and `sizes` behind; what it prints."""
        words = [names.get(word, word) for word in shown(command)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        done = completed([sys.executable, "-m", "slurm_rlhf.cli", *words, *sizes], cwd=self.path, env=environment)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def trained(folder: Folder) -> Path:
    """A run of the command on the page of algorithms."""
    tiny = ("--actor.num_gpus_per_node=1", "--vllm.num_engines=1", "--ds.param_dtype=fp32", "--ds.enable_sleep=false")
    batch = ("--rollout.batch_size=8", "--train.batch_size=32", "--train.colocate_all=false")
    command = "train sbatch/recipes/grpo.toml mine.toml --train.seed=7"
    folder.run(command, *tiny, *batch, *FEW, *SMALL, "--run_dir=runs/mine")
    return folder.path / "runs" / "mine"


def test_train_with_a_recipe(trained: Path) -> None:
    assert json.loads((trained / "summary.json").read_text())["steps"] == 2
    assert (trained / "final" / "config.json").is_file()


def test_eval_of_a_run(folder: Folder, trained: Path) -> None:
    assert "mean" in folder.run("eval FILE.toml --model=runs/mine")
    assert list(trained.glob("eval/*/eval.json"))


def test_generate_and_merge(folder: Folder, trained: Path) -> None:
    command = "generate sbatch/generate.toml --run_dir=runs/answers --generate.dataset=prompts.jsonl"
    folder.run(command, "--generate.model_name_or_path=runs/mine", "--generate.max_samples=12", *SMALL)
    answers = (folder.path / "runs" / "answers" / "output.jsonl").read_text().splitlines()
    assert len(answers) == 48
    folder.run("generate merge RUN_DIR", RUN_DIR="runs/answers")


def test_sft(folder: Folder) -> None:
    rows = [{"input": f"{a}+1=", "output": str(a + 1)} for a in range(9)]
    (folder.path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.run("sft FILE.toml", "--sft.dataset=answers.jsonl", "--sft.output_dir=tuned", "--sft.batch_size=9")
    assert (folder.path / "tuned" / "config.json").is_file()


def test_preflight(folder: Folder) -> None:
    assert "groups           ok" in folder.run("preflight FILE.toml", "--run_dir=runs/looked")


def test_submit_on_this_machine(folder: Folder) -> None:
    command = "submit FILE.toml --slurm.partition=gpu --slurm.gpus_per_node=8 [--local]"
    folder.run(command, *FEW, "--train.max_steps=1", "--run_dir=runs/submitted", "--slurm.gpus_per_node=0")


def test_check_parity(folder: Folder) -> None:
    assert "agree" in folder.run("check-parity DIRECTORY", "--precision=fp32", DIRECTORY="model")


def test_bench_rollout(folder: Folder) -> None:
    small = ("--prompts=8", "--repeats=1", "--hidden=64", "--layers=1")
    folder.run("bench rollout", *small, "--mean_response=8", "--threads=1")

"""`slurm-rlhf sft` as a user runs it: one process without torchrun, and two ranks with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stage_runs import VLLM_ON_CPU, metrics, run
from tiny_models import make_tiny
from waiting import HANG_S

from slurm_rlhf.algorithms.layout import Layout
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.examples import RefusedRows, load_examples
from slurm_rlhf.stages.kinds import SftTrainer
from slurm_rlhf.stages.stage import read_inputs
from slurm_rlhf.trainer.distributed import World

MARKS_OF_FIXTURES = {"trained": "slow"}

ROOT = Path(__file__).parents[2]
# Answers as vLLM samples them, with the log-probs of the tokens.
KEPT = (".control", "logs", "session.json")
"""Names in the directory of every run."""
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8, seed=0)
asked = [f"{a}+{b}=" for a, b in ((1, 2), (7, 9), (5, 5))]
answers = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=6, logprobs=0), use_tqdm=False)
stated = [
    [list(a.prompt_token_ids), list(o.token_ids), [next(iter(p.values())).logprob for p in o.logprobs]]
    for a in answers for o in a.outputs
]
print("ANSWERS " + json.dumps(stated))
"""


def run_sft(words: list[str], launcher: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, *launcher, str(cwd / "slurm-rlhf"), "sft", *words], cwd, {})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return make_job(tmp_path)


def make_job(tmp_path: Path) -> Path:
    # An installation puts this program on the PATH.
    (tmp_path / "slurm-rlhf").write_text("import sys\nfrom slurm_rlhf.cli.main import main\nsys.exit(main())\n")
    make_tiny(tmp_path / "model")
    rows = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(10) for b in range(10)]
    rows.append({"input": "1" * 60, "output": "too long"})
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::7]))
    config: dict[str, dict[str, Any]] = {
        "actor": {"model_name_or_path": "model", "lr_warmup_ratio": 0.1},
        "sft": {
            **{"dataset": "sums.jsonl", "output_dir": "out", "batch_size": 20, "max_epochs": 8},
            **{"learning_rate": 3e-3, "eval_dataset": "held_out.jsonl", "eval_steps": 5},
        },
        "data": {"max_len": 32},
        "ds": {"param_dtype": "fp32"},
        "train": {"max_tokens_per_gpu": 100},
    }
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()) for group, keys in config.items()
    ]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    return tmp_path


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/40 loss (\S+)", output)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a job that one process has done, and what it printed."""
    job = make_job(tmp_path_factory.mktemp("sft"))
    result = run_sft(["job.toml"], [], job)
    assert result.returncode == 0, result.stderr
    assert "DeepSpeed" not in result.stdout + result.stderr
    return job, result.stdout


def test_metrics_and_log_are_with_the_model(trained: tuple[Path, str]) -> None:
    job, printed = trained
    assert "100 examples, 1 dropped as too long, 40 steps" in printed
    alone = losses(printed)
    assert sorted(alone) == list(range(1, 41))
    assert 0 < alone[40] < 0.6 * alone[1]
    left = ["held_out.jsonl", "job.toml", "model", "out", "out.run", "slurm-rlhf", "sums.jsonl"]
    assert sorted(path.name for path in job.iterdir()) == left
    files = ["config.toml", "metrics.jsonl", "report.html", "sft.log", "summary.json", "tensorboard"]
    assert sorted(path.name for path in (job / "out.run").iterdir()) == sorted([*files, *KEPT])
    assert losses((job / "out.run" / "sft.log").read_text()) == alone
    measured = metrics(job / "out.run")
    assert [row["step"] for row in measured] == list(range(1, 41))
    assert {step: round(row["loss"], 4) for step, row in enumerate(measured, start=1)} == alone
    held_out = {row["step"]: row["eval/loss"] for row in measured if "eval/loss" in row}
    assert [*held_out] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert 0 < held_out[40] < 0.6 * held_out[5]
    assert all(row["lr"] > 0 and row["grad_norm"] > 0 and row["tokens"] > 20 for row in measured)


def test_two_ranks_learn_the_same_and_the_model_loads_everywhere(trained: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    job, alone = trained[0], losses(trained[1])
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    both = run_sft(["job.toml", "--sft.output_dir=both"], ranks, job)
    assert both.returncode == 0, both.stderr
    assert losses(both.stdout) == pytest.approx(alone, abs=2e-4)

    model = AutoModelForCausalLM.from_pretrained(job / "out", dtype="auto")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    sampled = run([sys.executable, "-c", VLLM, "out"], job, VLLM_ON_CPU)
    assert sampled.returncode == 0, sampled.stderr[-3000:]
    for prompt, response, stated in json.loads(sampled.stdout.split("ANSWERS ")[1].splitlines()[0]):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        ours = [float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(response)]
        assert ours == pytest.approx(stated, abs=1e-5)


def test_a_training_that_was_killed_or_stopped_goes_on_with_the_same_numbers(trained: tuple[Path, str]) -> None:
    job, measured = trained[0], metrics(trained[0] / "out.run")
    words = ["job.toml", "--sft.output_dir=again", "--sft.save_steps=8"]
    command = [sys.executable, str(job / "slurm-rlhf"), "sft", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(command, cwd=job, env=environment, stdout=subprocess.PIPE, text=True)
    for line in first.stdout:
        if line.startswith("sft: step 19/40"):
            first.kill()
    assert first.wait(timeout=HANG_S) == -signal.SIGKILL
    assert not (job / "again").exists()
    assert [path.name for path in (job / "again.run" / "checkpoints").glob("step_*[0-9]")] == ["step_000016"]

    second = subprocess.Popen(command, cwd=job, env=environment, stdout=subprocess.PIPE, text=True)
    said = []
    for line in second.stdout:
        said.append(line)
        if line.startswith("sft: step 20/40"):
            second.send_signal(signal.SIGSTOP)
            stated = run([sys.executable, str(job / "slurm-rlhf"), "cancel", "again.run"], job, {})
            second.send_signal(signal.SIGCONT)
            assert stated.stdout == f"process {second.pid} will save and end\n"
    assert second.wait(timeout=HANG_S) == 128 + signal.SIGTERM
    assert "step_000016 at step 16/40" in "".join(said)
    stopped = re.search(r"stopped by SIGTERM; saved at step (\d+)/40; the same command goes on", said[-1])
    assert stopped, said
    assert 20 <= int(stopped[1]) < 30
    assert not (job / "again").exists()

    resumed = run_sft(words, [], job)
    assert resumed.returncode == 0, resumed.stderr
    assert f"at step {stopped[1]}/40" in resumed.stdout
    assert min(losses(resumed.stdout)) == int(stopped[1]) + 1
    assert metrics(job / "again.run") == measured
    assert not (job / "again.run" / "checkpoints").exists()
    weights = [load_file(job / name / "model.safetensors") for name in ("out", "again")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_bad_input_is_one_message_and_leaves_nothing(job: Path) -> None:
    with (job / "sums.jsonl").open("a") as file:
        file.write('{"input": "1+1="}\n')
    result = run_sft(["job.toml"], [], job)
    assert result.returncode == 2
    assert re.search(r"sums\.jsonl:102: no column 'output' \(columns: input\)", result.stderr)
    assert "Traceback" not in result.stderr
    assert not (job / "out").exists()


def test_examples_in_process(job: Path) -> None:
    tokenizer, data = Tokenizer.load(job / "model"), Data(max_len=32)
    examples = load_examples(job / "sums.jsonl", tokenizer, data)
    first = examples.experience.select([0])
    assert tokenizer.decode(first.token_ids.tolist(), skip_special_tokens=False) == "0+0=0<eos>"
    assert (first.prompt_lens[0], first.response_lens[0]) == (4, 2)
    # A limit is a limit: 0+0=0<eos> has 6 tokens, 9+9=18<eos> has 7.
    assert {int(n) for n in load_examples(job / "sums.jsonl", tokenizer, Data(max_len=6)).experience.lengths} == {6}
    (job / "bad.jsonl").write_text('{"input": "1", "output": "2"}\n{"input": "1", "output": 2}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: 'output' must be a string, got int"):
        load_examples(job / "bad.jsonl", tokenizer, data)


def test_rows_that_are_no_examples_are_named_together(job: Path) -> None:
    rows: list[dict[str, Any]] = [{"input": "1", "output": "2"}, {"input": "", "output": "2"}]
    (job / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *[{"input": "1"}] * 6, rows[0]]))
    with pytest.raises(RefusedRows) as caught:
        load_examples(job / "bad.jsonl", Tokenizer.load(job / "model"), Data(max_len=32))
    said = str(caught.value)
    assert said.startswith(f"{job}/bad.jsonl: 7 rows cannot be used: {job}/bad.jsonl:2: the prompt is empty")
    assert [f"bad.jsonl:{line}: " in said for line in range(2, 9)] == [True] * 2 + [False] * 5
    assert said.endswith(" (and 5 more like it)")
    assert [place.rpartition(":")[2] for place in caught.value.examples.places] == ["1", "9"]


def test_held_out_examples_are_all_rows_of_their_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job)
    config = Config()
    config.actor.model_name_or_path = "model"
    config.sft.dataset, config.sft.eval_dataset, config.sft.batch_size = "sums.jsonl", "held_out.jsonl", 2
    config.data = Data(max_len=32, max_samples=5, filter=["output=1"])
    inputs = read_inputs(config, "sft")
    assert (len(inputs.examples), len(inputs.held_out)) == (2, 15)


def test_three_ranks_measure_each_example_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    examples = load_examples(job / "sums.jsonl", Tokenizer.load(job / "model"), Data(max_len=32))
    own: Any = SimpleNamespace(config=Config(), layout=Layout(), backend=SimpleNamespace(module=torch.nn.Linear(1, 1)))
    own.micro_batches = partial(SftTrainer.micro_batches, own)
    found = []
    for rank in range(3):
        own.world = World(rank, 3, torch.device("cpu"))
        found.append(SftTrainer.of_all(own, examples, lambda part: torch.from_numpy(part.lengths), of_rows=True))
    assert sum(found).tolist() == examples.experience.lengths.tolist()


def test_only_words_of_the_assistant_count(job: Path) -> None:
    """Another log-prob of a token that the mask leaves out changes neither loss nor gradient nor measurement."""
    lens, mask = np.array([1, 1], dtype=np.int32), np.array([True, False, True, True, False])
    ids, rewards = np.arange(7, dtype=np.int32), np.zeros(2, dtype=np.float32)
    part = Experience(lens, np.array([3, 2], dtype=np.int32), ids, mask, rewards)
    logprobs = torch.tensor([-1.0, -50.0, -2.0, -4.0, -50.0], requires_grad=True)
    trainer: Any = SimpleNamespace(
        logprobs=lambda _: logprobs, of_all=lambda *_, **__: logprobs.detach().numpy().astype(np.float32)
    )
    assert SftTrainer.denominator(trainer, part) == 3.0
    loss, metrics = SftTrainer._loss(trainer, part, 3.0)
    loss.backward()
    assert (float(loss.detach()), float(metrics["loss"])) == (pytest.approx(7 / 3), 7.0)
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, 0, -1 / 3, -1 / 3, 0])
    examples: Any = SimpleNamespace(experience=part)
    assert SftTrainer.measured(trainer, examples)["loss"] == pytest.approx(7 / 3)

"""A whole run with a reward model, everything sharded: what it was rewarded with, and with which weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_reward
from training_runs import metrics, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, EVALUATED, LONGEST = 2, 5, 8
SHARDED = (
    *("--actor.num_gpus_per_node=2", "--ds.zero_stage=3", "--actor.gradient_checkpointing_enable"),
    *("--ref.num_gpus_per_node=2", "--ref.zero_stage=3", "--reward.num_gpus_per_node=2", "--reward.remote_url="),
    *(f"--eval.max_samples={EVALUATED}", f"--train.max_steps={STEPS}"),
    *("--algo.kl.use_loss=true", "--algo.kl.estimator=k3+"),
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    config = workspace(path)
    make_reward(path / "rm", hidden=128, heads=4, kv_heads=2)
    code, output = train(config, path / "run", *SHARDED, f"--reward.model_name_or_path={path / 'rm'}", warm=True)
    assert code == 0, output
    return path / "run"


def expected_evaluation(work: Path) -> float:
    """Mean reward of the untrained model's greedy responses, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(work / "model")
    judge = AutoModelForSequenceClassification.from_pretrained(work / "rm", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    rows = [json.loads(line) for line in (work / "eval.jsonl").read_text().splitlines()[:EVALUATED]]
    scores = []
    with torch.no_grad():
        for row in rows:
            ids = tokenizer(row["input"], return_tensors="pt")["input_ids"]
            for _ in range(LONGEST):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
                if int(ids[0, -1]) == tokenizer.eos_token_id:
                    break
            scores.append(float(judge(input_ids=ids).logits[0, 0]))
    return sum(scores) / len(scores)


def test_rewards_are_those_of_a_transformers_forward(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["world"] == {"actor": 2, "critic": 1, "reference": 2, "reward": 2, "rollout": 1}
    assert summary["eval_before"] == pytest.approx(expected_evaluation(run_dir.parent), abs=1e-5)
    assert list((run_dir / "logs").glob("reward.*.1.log"))


def test_the_critic_started_from_the_reward_model_and_said_so(run_dir: Path) -> None:
    log = next((run_dir / "logs").glob("conductor.*.log")).read_text()
    assert f"critic: starts from {run_dir.parent / 'rm'}, a reward model, and keeps its head (score)" in log
    assert "that is not the padding token (transformers' rule for score.weight)" in log


def test_engines_and_reference_had_the_actors_weights(run_dir: Path) -> None:
    rows = metrics(run_dir)
    assert len(rows) == STEPS
    for row in rows:
        assert row["rollout_logprob_diff_max"] < 1e-5
    assert abs(rows[0]["kl"]) < 1e-5
    assert abs(rows[1]["kl"]) > 1e-4
    assert rows[1]["kl_loss"] > 0  # the KL penalty is a term of the loss, on sharded actor and reference
    assert 0 < abs(rows[0]["reward"]) < 10


def test_the_checkpoint_is_of_what_was_trained(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints" / f"step_{STEPS:06d}"
    assert {path.name for path in checkpoint.iterdir() if path.is_dir()} == {"actor", "critic"}

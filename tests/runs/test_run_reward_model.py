"""PPO's kin against a reward model that `slurm-rlhf rm` has trained gets better at what held-out preferences say."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import train, workspace
from waiting import HANG_S

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

RM = [sys.executable, "-c", "import sys; from slurm_rlhf.cli.main import main; sys.exit(main())", "rm"]
PPO = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--reward.remote_url=", "--eval.dataset="),
    *("--train.batch_size=32", "--train.max_epochs=1", "--train.max_steps=40", "--reward.normalize_enable=true"),
)


def pairs(prompts: list[str], seed: int) -> str:
    """Of two answers of eight digits the one with more sevens is preferred."""
    rng, lines = random.Random(seed), []
    for prompt in prompts:
        answers = ["".join(rng.choice("0123456777") for _ in range(8)) for _ in range(2)]
        rejected, chosen = sorted(answers, key=lambda answer: answer.count("7"))
        if chosen.count("7") > rejected.count("7"):
            lines.append(json.dumps({"input": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    return "".join(lines)


def sevens(model: Path, prompts: list[str]) -> float:
    """Mean number of sevens in greedy answers of eight tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    count = 0
    with torch.no_grad():
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            found = policy.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
            count += tokenizer.decode(found[0, ids.shape[1] :]).count("7")
    return count / len(prompts)


def test_the_policy_learns_what_the_reward_model_has_learned_from_preferences(tmp_path: Path) -> None:
    config = workspace(tmp_path)
    rows = [json.loads(line)["input"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    held_out = [json.loads(line)["input"] for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    (tmp_path / "pairs.jsonl").write_text(pairs(rows * 4, 1))
    (tmp_path / "held_out.jsonl").write_text(pairs(held_out * 4, 2))
    keys = {
        "actor.model_name_or_path": tmp_path / "model",
        "rm.dataset": tmp_path / "pairs.jsonl",
        "rm.eval_dataset": tmp_path / "held_out.jsonl",
        "rm.output_dir": tmp_path / "rm",
        "rm.learning_rate": 1e-3,
        "rm.batch_size": 32,
        "rm.max_epochs": 6,
        "data.max_len": 64,
        "ds.param_dtype": "fp32",
    }
    (tmp_path / "empty.toml").write_text("")
    words = [*RM, str(tmp_path / "empty.toml"), *(f"--{key}={value}" for key, value in keys.items())]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads((tmp_path / "rm.run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/accuracy"] > 0.9
    assert last["eval/calibration_error"] < 0.1
    code, output = train(config, tmp_path / "run", *PPO, f"--reward.model_name_or_path={tmp_path / 'rm'}", warm=True)
    assert code == 0, output
    assert f"rewards are normalised by {tmp_path / 'rm'}/config.json: mean" in output
    assert sevens(tmp_path / "run" / "final", held_out) > sevens(tmp_path / "model", held_out) + 2

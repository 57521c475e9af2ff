"""What `bench learn` starts of the peer, but for TRL itself: its prompts, its judge, its evaluations and its curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learn_peer import Curve, Judge, PeerRun, accuracy, prompt_set
from tiny_models import make_tiny

from slurm_rlhf.config.schema import Config

QUICKSTART = Path(__file__).parents[2] / "sbatch" / "quickstart_reward.py"

BY_NAME = """
def reward_func(*, responses, response_ids, prompt_ids, finish_reasons, rows, labels, step):
    told = zip(responses, response_ids, prompt_ids, finish_reasons, rows, labels, strict=True)
    print("told", step, list(told))
    return {"rewards": [float(len(ids)) for ids in response_ids], "scores": [0.25] * len(responses)}
"""

ROWS = [{"input": "1+1=", "label": "2", "why": "short"}, {"input": "12+34=", "label": "46", "why": "long"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("peer") / "model")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    made = Config()
    made.actor.model_name_or_path = str(model)
    made.data.max_len, made.rollout.max_new_tokens = 64, 6
    made.eval.dataset = str(tmp_path / "eval.jsonl")
    Path(made.eval.dataset).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made.reward.remote_url = str(QUICKSTART)
    return made


def reward_file(config: Config, tmp_path: Path, source: str) -> None:
    config.reward.remote_url = str(tmp_path / "reward.py")
    Path(config.reward.remote_url).write_text(source)


def test_the_quickstarts_reward_judges_the_peer_as_it_judges_a_run(config: Config) -> None:
    prompts = list(prompt_set(config, config.eval.dataset))
    assert [prompt.text for prompt in prompts] == ["1+1=", "12+34="]
    judged = Judge(config, eos=1)(prompts, ["2", "47"], [[4, 1], [6, 9, 1]], training=True)
    assert judged.rewards.tolist() == [1.0, 0.0]
    assert judged.scores is not None
    assert judged.scores.tolist() == [1.0, 0.0]


def test_a_reward_function_gets_what_the_names_in_its_signature_ask_for(
    config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reward_file(config, tmp_path, BY_NAME)
    judge = Judge(config, eos=1)
    judge.step = 7
    prompts = list(prompt_set(config, config.eval.dataset))
    judged = judge(prompts, ["2", "464646"], [[4, 1], [6, 8, 6, 8, 6, 8]], training=True)
    assert judged.rewards.tolist() == [2.0, 6.0]
    judge(prompts, ["2", "46"], [[4, 1], [6, 8, 1]], training=False)
    ids = [prompt.token_ids.tolist() for prompt in prompts]
    first = [("2", [4, 1], ids[0], "stop", ROWS[0], "2")]
    second = ("464646", [6, 8, 6, 8, 6, 8], ids[1], "length", ROWS[1], "46")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("told")]
    assert lines[0] == f"told 8 {[*first, second]}"
    assert lines[1] == f"told 7 {[*first, ('46', [6, 8, 1], ids[1], 'stop', ROWS[1], '46')]}"


def test_an_evaluation_is_the_mean_of_the_greedy_answers_scores(config: Config, tmp_path: Path, model: Path) -> None:
    """With prompts of unlike lengths, padded on the left: each answer is the one that its prompt gets alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    policy.train()
    prompts = prompt_set(config, config.eval.dataset)
    alone = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids.tolist()])
        whole = policy.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=False)
        alone.append(text.partition(tokenizer.eos_token)[0])
    policy.train()
    told = json.dumps(alone)
    reward_file(
        config,
        tmp_path,
        f"def reward_func(*, responses):\n    assert responses == {told}, responses\n"
        "    return {'rewards': [9.0, 9.0], 'scores': [1.0, 0.0]}\n",
    )
    assert accuracy(policy, tokenizer, prompts, Judge(config, tokenizer.eos_token_id)) == 0.5
    assert policy.training


def test_the_clock_stands_while_it_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def evaluate() -> float:
        now[0] += 50.0
        return 0.5

    spec = tmp_path / "peer.json"
    PeerRun("run.toml", str(tmp_path / "out.jsonl"), 1, 4, 2, 2, began=90.0).write(spec)
    run = PeerRun(**json.loads(spec.read_text()))
    curve = Curve(run, evaluate)
    for step in (0, 2, 4):
        curve.point(step)
        now[0] += 3.0
    lines: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["step"], line["seconds"]) for line in lines] == [(0, 0.0), (2, 3.0), (4, 6.0)]
    assert np.isclose(lines[0]["start_up_s"], 60.0)

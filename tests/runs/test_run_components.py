"""A whole run that learns from the components of a reward, and leaves out responses that were cut off.

Its batch is one optimizer step, so that the actor passes nothing forward before it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from patched_ranks import calls, noted
from training_runs import metrics, summary, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REWARD = """
def reward_func(responses, labels, finish_reasons):
    assert set(finish_reasons) <= {"stop", "length", "repetition"}
    right = [float(label in response) for label, response in zip(labels, responses)]
    short = [-float(len(response)) for response in responses]
    return {"rewards": right, "components": {"right": right, "short": short}}
"""

KEYS = (
    *("--algo.advantage.estimator=gdpo", "--algo.kl.init_coef=0"),
    *('--algo.advantage.gdpo_reward_keys=["short","right"]', "--algo.advantage.gdpo_reward_weights=[0.5,1.0]"),
    *("--rollout.mask_truncated", "--rollout.repetition_detection_max_pattern_size=2"),
    *("--rollout.repetition_detection_min_count=3", "--eval.dataset=", "--train.max_steps=2"),
    *("--train.batch_size=32", "--train.max_epochs=1"),
)


def test_components_ends_and_the_mask_go_through_a_run(tmp_path: Path) -> None:
    config = workspace(tmp_path, REWARD)
    with noted(tmp_path / "noted") as file:
        code, output = train(config, tmp_path / "run", *KEYS, warm=True)
    assert code == 0, output
    assert summary(tmp_path / "run")["world"] == {"actor": 1, "rollout": 1}
    for row in metrics(tmp_path / "run"):
        assert row["reward"] == row["reward/right"]
        assert row["reward/short"] < 0
        assert 0 <= row["repetition"] <= row["truncated"] < 1
        assert 0 < row["shaping/masked"] < 1
        assert row["ratio"] == pytest.approx(1, abs=1e-5)  # over the tokens that are left
        assert row["actor_grad_norm"] > 0
        assert 0 < row["rollout_logprob_diff"] <= row["rollout_logprob_diff_max"] < 1e-4
        assert 0 < row["correction/log_rho_max"] < 1e-4
    methods = [call.method for call in calls(file) if call.role == "actor"]
    assert methods.count("train_step") == 2
    assert methods.count("logprobs") == 1  # the self-check's
    assert 0 < summary(tmp_path / "run")["self_check"]["alone"] < 1e-5
    assert "self-check, first update: mean ratio 1" in output

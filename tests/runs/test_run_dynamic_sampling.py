"""Runs whose groups are dropped and refilled: exact over a resume, and with a clear end where nothing passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import metrics, saved, summary, timeless, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BATCH, SAMPLES = 8, 2
REWARD = """
from pathlib import Path

def reward_func(response_ids, step):
    constant = Path(__file__).with_name("constant").exists() and step > 2
    return [0.0 if constant else float(sum(tokens) % 2) for tokens in response_ids]
"""
"""About half of the groups of two have spread; in another directory none from the third step on."""

FILTERED = (
    "--algo.dynamic_filtering_enable=true",
    f"--rollout.n_samples_per_prompt={SAMPLES}",
    "--algo.advantage.estimator=rloo",
    "--algo.kl.init_coef=0",
    "--train.batch_size=16",
    "--train.max_epochs=1",
    "--train.max_steps=3",
    "--eval.dataset=",
)


def test_resumed_it_writes_the_same_metrics(tmp_path: Path) -> None:
    """Which prompts come next, how many a round has and which engine gets them: all as if nothing had happened."""
    config = workspace(tmp_path, REWARD)
    world = (*FILTERED, "--vllm.num_engines=2", "--ckpt.save_steps=1")
    code, output = train(config, tmp_path / "whole", *world, warm=True)
    assert code == 0, output
    rows = metrics(tmp_path / "whole")
    for row in rows:
        assert row["reward_constant"] == 0  # every group has spread
        assert row["dynamic_filtering/prompts"] > BATCH
        assert row["dynamic_filtering/pass_rate"] * row["dynamic_filtering/prompts"] >= BATCH - 1e-6
    # What a run that was killed after its first checkpoint would go on from.
    first = tmp_path / "whole" / "checkpoints" / "step_000001"
    code, output = train(config, tmp_path / "resumed", *world, f"--resume={first}", warm=True)
    assert code == 0, output
    assert timeless(metrics(tmp_path / "resumed")) == timeless(rows[1:])
    assert len(rows) == 3


def test_engines_that_sleep_refill_awake_and_a_run_of_which_nothing_passes_saves_and_says_so(tmp_path: Path) -> None:
    config = workspace(tmp_path, REWARD)
    (tmp_path / "constant").touch()
    code, output = train(
        config,
        tmp_path / "run",
        *FILTERED,
        "--train.full_determinism=false",
        "--train.colocate_all=true",
        "--algo.dynamic_filtering_max_tries=3",
        "--rollout.vllm_generate_batch_size=12",
        warm=True,
    )
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2], output
    for row in rows:
        assert row["reward_constant"] == 0
        assert row["dynamic_filtering/prompts"] >= BATCH
    assert code == 1
    assert "step 3: dynamic sampling kept 0 of 36 groups (0.0%)" in output
    assert "algo.dynamic_filtering_max_tries = 3" in output
    assert "Traceback" not in output
    assert summary(tmp_path / "run")["status"] == "failed"
    assert saved(tmp_path / "run") == [2]

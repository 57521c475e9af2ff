"""A run whose old log-probs are the engine's: no pass of the actor before an update, and it learns all the same."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from patched_ranks import Call, calls, noted
from training_runs import metrics, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 24
WORLD = (
    "--algo.correction.bypass=true",
    "--algo.advantage.estimator=group_norm",
    "--algo.kl.init_coef=0",
    "--train.max_epochs=1",
    "--train.batch_size=32",
    f"--train.max_steps={STEPS}",
    "--eval.dataset=",
)

SEVENS = """
def reward_func(responses):
    return [response.count("7") / 8 for response in responses]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[Call]]:
    path = tmp_path_factory.mktemp("bypass")
    config = workspace(path, SEVENS)
    with noted(path / "noted") as file:
        code, output = train(config, path / "run", *WORLD, warm=True)
    assert code == 0, output
    return path / "run", output, calls(file)


def test_the_actor_passes_nothing_forward_but_for_the_self_check(run: tuple[Path, str, list[Call]]) -> None:
    _, _, made = run
    of_actor = [call.method for call in made if call.role == "actor" and call.method != "sync_push"]
    before = of_actor[: of_actor.index("train_step")]
    assert before.count("logprobs") == before.count("self_check") == 1
    assert of_actor.count("logprobs") == 1
    assert of_actor.count("train_step") == STEPS


def test_it_learns(run: tuple[Path, str, list[Call]]) -> None:
    rewards = [row["reward"] for row in metrics(run[0])]
    print([round(reward, 3) for reward in rewards])
    # Five seeds, two of them with the instructions of AVX2 alone, rise by 0.925 to 0.980; without learning, by 0.
    assert statistics.mean(rewards[-6:]) > statistics.mean(rewards[:6]) + 0.8


def test_the_first_update_measures_what_the_pass_would_have(run: tuple[Path, str, list[Call]]) -> None:
    rows = metrics(run[0])
    # A policy that has learned gives its only response a log-prob of 0 in engine and actor.
    assert rows[0]["correction/log_rho_mean"] > 0
    for row in rows:
        assert {"correction/k1", "correction/k3", "correction/chi2", "approx_kl"} <= set(row)
        assert row["correction/log_rho_mean"] < 1e-5
        assert row["correction/log_rho_mean"] <= row["correction/log_rho_max"] < 1e-4
        assert row["correction/truncated"] == row["correction/dropped"] == 0
        assert row["rollout_logprob_diff"] == pytest.approx(row["correction/log_rho_mean"], rel=1e-4)
        assert row["correction/ess"] == pytest.approx(1.0, abs=1e-6)
        assert row["first_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["correction/not_finite"] == 0


def test_the_self_check_compares_engine_and_actor_and_says_what_bypass_means(
    run: tuple[Path, str, list[Call]],
) -> None:
    run_dir, output, _ = run
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert 0 < summary["self_check"]["engine"] < 1e-5
    assert 0 < summary["self_check"]["alone"] < 1e-5
    assert "warning: algo.correction.bypass with train.full_determinism: the old log-probs are the engines'" in output

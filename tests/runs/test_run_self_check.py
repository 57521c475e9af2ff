"""Runs that the self-check stops before they train, and one that it lets pass although its model has dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from patched_ranks import patched_engines
from random_models import make_model
from training_runs import metrics, started, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = ("--algo.kl.init_coef=0", "--eval.dataset=")

COLDER = """
def change(module):
    from slurm_rlhf.engine import _vllm
    params = _vllm._sampling_params
    def colder(*args):
        made = params(*args)
        made.temperature *= 0.95
        return made
    _vllm._sampling_params = colder
"""

FAR_OUT = """
def reward_func(queries, prompts, labels, **kwargs):
    return [25.0 + len(response) % 3 for response in kwargs["responses"]]
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """(run directory, exit code, what it printed). A fifth of its prompts is too long, its rewards are out of range."""
    path = tmp_path_factory.mktemp("self_check")
    config = workspace(path, FAR_OUT)
    with (path / "prompts.jsonl").open("a") as file:
        file.writelines(json.dumps({"input": "1" * 60}) + "\n" for _ in range(30))
    with patched_engines(path / "patch", COLDER):
        overrides = ("--algo.kl.init_coef=0", "--train.max_steps=1")
        with started(config, path / "run", *overrides, warm=True) as run:
            code, output = run.wait()
            run.assert_gone()
    return path / "run", code, output


def test_one_error_names_the_check_the_figure_and_what_to_change(stopped: tuple[Path, int, str]) -> None:
    run_dir, code, output = stopped
    assert code == 2
    assert "Traceback" not in output
    assert output.count("self-check failed") == 1
    told = next(line for line in output.splitlines() if "self-check failed" in line)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert "self-check failed (engine): " in told
    assert f" are {summary['self_check']['engine']:.3g} nats apart (largest of " in told
    # The actor's numbers are the same again, so it is the engine's that are off.
    figure = f"{summary['self_check']['engine']:.3g}"
    assert f"; computed again, the actor's are 0 from its first and {figure} from the engine's)" in told
    assert "rollout.temperature" in told
    assert summary["status"] == "failed"
    assert summary["self_check"]["engine"] > 0.01
    assert summary["self_check"]["again"] == summary["self_check"]["eval"] == 0.0
    assert summary["self_check"]["alone"] < 1e-5


def test_nothing_was_trained_or_saved(stopped: tuple[Path, int, str]) -> None:
    run_dir = stopped[0]
    assert metrics(run_dir) == []
    assert json.loads((run_dir / "summary.json").read_text())["eval_before"] is None  # nor was it evaluated
    assert not (run_dir / "final").exists()
    assert list(run_dir.glob("checkpoints/step_*")) == []


def test_prompts_that_were_dropped_and_rewards_that_are_clipped_are_warned_of(stopped: tuple[Path, int, str]) -> None:
    run_dir, _, output = stopped
    lines = output.splitlines()
    shares = "self-check, prompts: 20 % dropped, 0 % with a doubled BOS, 0 % with an answer, "
    assert any(line.startswith(shares) for line in lines)
    assert any(line.startswith("warning: 20 % of the prompts are longer than data.max_len") for line in lines)
    assert any(line.startswith("self-check, rewards: 100 % clipped, ") for line in lines)
    assert any(line.startswith("step 1: warning: 100% of the rewards lie outside reward.clip_range") for line in lines)
    assert any(line.startswith("warning:") and "were cut off at rollout.max_new_tokens" in line for line in lines)
    log = next((run_dir / "logs").glob("conductor.*.log")).read_text()
    assert "self-check, rewards: 100 % clipped" in log


def test_a_model_with_dropout_trains_with_a_ratio_of_one(tmp_path: Path) -> None:
    """OPT drops activations by a function, and says so in config.json alone."""
    config = workspace(tmp_path)
    make_model(tmp_path / "opt", "opt")
    assert json.loads((tmp_path / "opt" / "config.json").read_text())["dropout"] == 0.3
    model, one_update = (
        f"--actor.model_name_or_path={tmp_path / 'opt'}",
        ("--train.batch_size=32", "--train.max_epochs=1"),
    )
    with started(config, tmp_path / "run", model, *one_update, *SMALL, "--train.max_steps=2", warm=True) as run:
        code, output = run.wait()
        run.assert_gone()
    assert code == 0, output
    for row in metrics(tmp_path / "run"):
        assert row["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert row["clip_fraction"] == 0.0
        assert row["rollout_logprob_diff_max"] < 1e-4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["self_check"]["again"] == 0.0
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["dropout"] == 0.3

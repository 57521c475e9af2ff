"""Whole runs that the self-check stops or lets pass, one in fp16, and one from Python with a plugin."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from kit_gpus import visible
from patched_ranks import patched_engines
from programs import completed
from random_models import make_model
from safetensors import safe_open
from training_runs import finished, metrics, train, workspace

from slurm_rlhf.cli.main import main
from slurm_rlhf.docs.pages import page

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
        return path / "run", *train(config, path / "run", *overrides, warm=True)


def test_one_error_names_the_check_the_figure_and_what_to_change(stopped: tuple[Path, int, str]) -> None:
    run_dir, code, output = stopped
    assert code == 2
    assert "Traceback" not in output
    assert output.count("self-check failed") == 1
    stated = next(line for line in output.splitlines() if "self-check failed" in line)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert "self-check failed (engine): " in stated
    assert "step 1: warning: 100% of the rewards lie outside reward.clip_range" in output
    assert f" are {summary['self_check']['engine']:.3g} nats apart (largest of " in stated
    # The actor's numbers are the same again, so it is the engine's that are off.
    figure = f"{summary['self_check']['engine']:.3g}"
    assert f"; computed again, the actor's are 0 from its first and {figure} from the engine's)" in stated
    assert "rollout.temperature" in stated
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


def test_a_model_with_dropout_trains_with_a_ratio_of_one(tmp_path: Path) -> None:
    """OPT drops activations by a function, and says so in config.json alone."""
    config = workspace(tmp_path)
    make_model(tmp_path / "opt", "opt")
    assert json.loads((tmp_path / "opt" / "config.json").read_text())["dropout"] == 0.3
    model, one_update = (
        f"--actor.model_name_or_path={tmp_path / 'opt'}",
        ("--train.batch_size=32", "--train.max_epochs=1"),
    )
    finished(config, tmp_path / "run", model, *one_update, *SMALL, "--train.max_steps=2")
    for row in metrics(tmp_path / "run"):
        assert row["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert row["clip_fraction"] == 0.0
        assert row["rollout_logprob_diff_max"] < 1e-4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["self_check"]["again"] == 0.0
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["dropout"] == 0.3


# --- run precision ----------------------------------------------------------------------------------------------------


STEPS = 2
BF16_DIFFERENCE = 0.009
"""Mean of |log-prob of the engine - log-prob of the actor| of this run in bf16."""


def test_fp16_in_trainer_and_engine(tmp_path: Path) -> None:
    config = workspace(tmp_path / "work")
    words = ["--ds.param_dtype=fp16", "--ds.fp32_lm_head=true", "--ds.initial_scale_power=20"]
    run_dir = tmp_path / "run"
    finished(config, run_dir, *words, f"--train.max_steps={STEPS}", "--eval.dataset=")
    rows = metrics(run_dir)
    assert len(rows) == STEPS
    for role in ("actor", "critic"):
        assert rows[0][f"{role}_skipped_steps"] > 0
        assert rows[-1][f"{role}_loss_scale"] < 2.0**20
        assert rows[-1][f"{role}_grad_norm"] > 0.0
    for row in rows:
        assert row["rollout_logprob_diff"] < BF16_DIFFERENCE / 4
        assert row["first_approx_kl"] == pytest.approx(0.0, abs=1e-6)
    figures = json.loads((run_dir / "summary.json").read_text())["self_check"]
    assert figures["engine"] < BF16_DIFFERENCE / 4
    (file,) = (run_dir / "final").glob("*.safetensors")
    with safe_open(file, "pt") as final:
        assert {str(final.get_tensor(name).dtype) for name in final.keys()} == {"torch.float16"}  # noqa: SIM118


# --- run plugin -------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
AGAIN = """
again = train(config, reward=right_digit, prompts=prompts, algorithm="group_mean")
assert again == summary, again  # already finished
print(type(summary).__name__)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(directory of the script, what it printed). The script comes by standard input, as a notebook's cells do."""
    section = page("algorithms").split("## From Python")[1].split("\n## ")[0]
    script, plugin = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) < 20
    folder = tmp_path_factory.mktemp("plugin")
    workspace(folder)
    (folder / "my_algorithm.py").write_text(plugin)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": visible()}
    done = completed([sys.executable, "-"], input=script + AGAIN, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_it_trains_and_returns_the_summary(run: tuple[Path, str]) -> None:
    folder, output = run
    lines = output.splitlines()
    assert any(line.startswith("finished {'actor': 1, 'rollout': 1} 0.") for line in lines)
    assert lines[-1] == "Summary"
    rows = metrics(folder / "runs" / "from_python")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor_grad_norm"] > 0
        assert "policy_loss" in row
        assert not {"value", "return", "value_loss", "critic_lr", "ratio"} & set(row)


def test_no_critic_and_no_reference_ran_or_were_saved(run: tuple[Path, str]) -> None:
    run_dir = run[0] / "runs" / "from_python"
    logs = {path.name.partition(".")[0] for path in (run_dir / "logs").iterdir()}
    assert logs == {"conductor", "nodes", "actor", "rollout"}
    checkpoint = run_dir / "checkpoints" / "step_000002"
    assert [path.name for path in checkpoint.iterdir() if path.is_dir()] == ["actor"]
    assert list((run_dir / "final").glob("*.safetensors"))


def test_the_plan_has_no_row_of_theirs(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """From the configuration that the run left behind, by the command line."""
    assert main(["plan", str(run[0] / "runs" / "from_python" / "config.toml"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["world"]) == {"actor", "rollout"}


def test_the_checkpoint_remembers_what_was_in_the_plugin(run: tuple[Path, str]) -> None:
    """So that a resume with another file is noticed: see `changed_plugins`."""
    state = json.loads((run[0] / "runs" / "from_python" / "checkpoints" / "step_000002" / "state.json").read_text())
    assert [Path(name).name for name in state["plugins"]] == ["my_algorithm.py"]

"""How runs end that cannot go on: which message, which exit code, and what is left."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from training_runs import metrics, started, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = ("--algo.kl.init_coef=0",)
"""No reference: what fails is not about it."""
ENDLESS = ("--train.max_steps=1000", "--train.num_episodes=1000")

RAISES_LATER = """
calls = 0

def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if calls > 3:  # a step, the evaluation before its update, and another step
        return [1.0 / (calls - 4) for _ in queries]
    return [1.0 for _ in queries]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("runs"))


def test_a_reward_function_that_raises_costs_no_step_and_ctrl_c_ends_what_goes_on(
    tmp_path: Path,
) -> None:
    config = workspace(tmp_path, RAISES_LATER)
    with started(config, tmp_path / "run", *SMALL, "--ckpt.save_steps=0", warm=True) as run:
        code, output = run.wait()
        run.assert_gone()
    assert code == 2
    assert "Traceback" not in output
    assert "ZeroDivisionError" in output
    assert "reward.py" in output
    assert "reward.py:8" in output
    assert f"(traceback and what it printed: {tmp_path / 'run' / 'logs' / 'reward.log'})" in output
    assert "the steps up to 2 are saved: the same command goes on from there" in output
    log = next((tmp_path / "run" / "logs").glob("conductor.*.log")).read_text()
    assert "Traceback" in log
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n    print('so many words')\n"
        "    return [0.0] * len(queries)\n"
    )
    with started(config, tmp_path / "run", *SMALL, *ENDLESS, warm=True) as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGINT)  # Ctrl-C ends what the run has started
        code, output = run.wait()
        run.assert_gone()
    assert code == 130, output
    assert "step_000002" in output  # where it went on
    assert "loading actor, critic; starting 1 engines" in output
    assert re.search(r"^actor is ready after \d+ s$", output, re.MULTILINE)
    assert re.search(r"^critic is ready after \d+ s$", output, re.MULTILINE)
    assert "so many words" not in output
    printed = (tmp_path / "run" / "logs" / "reward.log").read_text()
    assert "ZeroDivisionError" in printed
    assert printed.endswith("so many words\n")
    assert "Traceback" not in output
    assert "press it again to end it at once" in output
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["status"] == "stopped"
    assert f"stopped by Ctrl-C; saved at step {saved['steps']}/" in output
    assert (tmp_path / "run" / "checkpoints" / f"step_{saved['steps']:06d}").is_dir()


def test_a_killed_rank_ends_the_run_and_is_named(config: Path) -> None:
    precision = ("--ds.param_dtype=bf16", "--ds.zero_stage=0")
    calm = ("--train.max_restarts=0",)
    with started(config, config.parent / "killed", *precision, *SMALL, *ENDLESS, *calm, warm=True) as run:
        run.wait_for_step(1)
        worker = run.worker("critic")
        os.kill(worker, signal.SIGKILL)
        code, output = run.wait()
        run.assert_gone()
    assert code == 1
    # Weights that are fp32 under autocast went, rounded, to a bf16 engine.
    assert metrics(config.parent / "killed")[0]["rollout_logprob_diff"] < 0.05
    assert re.search(rf"role critic died: rank \d on \S+ \(pid {worker}\) was killed by SIGKILL", output)
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "override, expected",
    [
        ("--train.batchsize=8", "train.batch_size"),
        ("--actor.learning_rate=fast", "actor.learning_rate"),
        ("--train.batch_size=7", "train.batch_size"),
        ("--data.prompt_dataset=nowhere.jsonl", "nowhere.jsonl"),
        ("--actor.num_nodes=2", "actor.num_nodes"),
    ],
)
def test_bad_configuration_starts_nothing(config: Path, tmp_path: Path, override: str, expected: str) -> None:
    code, output = train(config, tmp_path / "run", override)
    assert code == 2
    assert expected in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "logs").exists()


def test_bad_files_are_named_with_their_line(config: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"input": "1+1=", "label": "2"}\n{"input": \n')
    code, output = train(config, tmp_path / "run", f"--data.prompt_dataset={tmp_path / 'broken.jsonl'}")
    assert code == 2
    assert "broken.jsonl:2" in output
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((config.parent / "model" / name).read_bytes())
    code, output = train(config, tmp_path / "run", f"--actor.model_name_or_path={bare}")
    assert code == 2
    assert "tokenizer" in output

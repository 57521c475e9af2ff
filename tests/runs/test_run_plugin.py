"""The worked example of docs/algorithms.md: a run from Python, with an algorithm of the user's without a critic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit_seats import visible
from training_runs import metrics, workspace
from waiting import HANG_S

from slurm_rlhf.cli.main import main
from slurm_rlhf.docs.pages import page

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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
    done = subprocess.run(
        [sys.executable, "-"],
        input=script + AGAIN,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": visible()},
        timeout=HANG_S,
        check=False,
    )
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
    assert logs == {"conductor", "actor", "rollout", "reward"}  # reward.log: what the user's function prints
    checkpoint = run_dir / "checkpoints" / "step_000002"
    assert [path.name for path in checkpoint.iterdir() if path.is_dir()] == ["actor"]
    assert list((run_dir / "final").glob("*.safetensors"))


def test_the_plan_has_no_row_of_theirs(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """From the configuration that the run left behind, by the command line."""
    assert main(["plan", str(run[0] / "runs" / "from_python" / "config.toml"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["world"]) == {"actor", "rollout"}


def test_the_configuration_says_that_the_command_line_cannot_train_with_it(run: tuple[Path, str]) -> None:
    text = (run[0] / "runs" / "from_python" / "config.toml").read_text()
    assert text.startswith('# `slurm-rlhf train` cannot read this file: reward.function = "right_digit" is known to')


def test_the_checkpoint_remembers_what_was_in_the_plugin(run: tuple[Path, str]) -> None:
    """So that a resume with another file is noticed: see `changed_plugins`."""
    state = json.loads((run[0] / "runs" / "from_python" / "checkpoints" / "step_000002" / "state.json").read_text())
    assert [Path(name).name for name in state["plugins"]] == ["my_algorithm.py"]

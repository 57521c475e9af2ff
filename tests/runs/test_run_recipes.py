"""Every recipe trains for two steps, laid under the quickstart and a tiny model with a task of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from training_runs import COMMAND, Run, metrics, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SBATCH = Path(__file__).parents[2] / "sbatch"
RECIPES = sorted(path.stem for path in (SBATCH / "recipes").glob("*.toml"))
SMALL = (
    *("--train.max_steps=2", "--train.max_epochs=1", "--train.full_determinism=false"),
    *("--eval.dataset=", "--logger.tensorboard=false"),
)
MORE = {"dapo": ("--reward.overlong_buffer_len=2", "--rollout.vllm_generate_batch_size=12")}
"""What the quickstart switches off in a recipe, because its answers are short and its batches small."""
ROLES = {"ppo": {"critic", "reference"}, "reinforce_pp": {"reference"}, "rloo": {"reference"}}
"""Of a recipe, beside the actor and the engines."""
# Of rows of a group without spread there is no gradient: a reward by which responses to a prompt always differ.
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return [sum(map(ord, response)) % 7 / 7 for response in kwargs["responses"]]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("recipes"), REWARD)


@pytest.mark.parametrize("name", RECIPES)
def test_it_trains(name: str, config: Path, tmp_path: Path) -> None:
    files = [str(SBATCH / "recipes" / f"{name}.toml"), str(SBATCH / "quickstart.toml")]
    run = Run(config, tmp_path / "run", *SMALL, *MORE.get(name, ()), command=[*COMMAND, *files], warm=True)
    code, output = run.wait()
    assert code == 0, output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor_grad_norm"] > 0
        assert all(math.isfinite(value) for value in row.values())
    assert ("value_loss" in rows[0]) == (name == "ppo")
    roles = {"actor", "rollout"} | ROLES.get(name, set())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world"].keys() == roles

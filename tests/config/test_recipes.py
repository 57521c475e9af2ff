"""The recipes: each parses, holds what its header says, and can be laid under a file of a user's own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from model_configs import SHAPES

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ACTOR, CRITIC, REFERENCE, ROLES, ROLLOUT, running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.engine_memory import GIB
from slurm_rlhf.placement.memory import account
from slurm_rlhf.placement.model_shape import shape_of

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
RECIPES = sorted(path.stem for path in (SBATCH / "recipes").glob("*.toml"))
NAMES = ["async_grpo", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce_pp", "rloo"]
WITH_REFERENCE = {"ppo", "reinforce_pp", "rloo"}
QUICKSTART = SBATCH / "quickstart.toml"


def header(name: str) -> str:
    text = (SBATCH / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    return text[: text.index("\n\n")]


def test_all_recipes_are_there() -> None:
    assert RECIPES == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_sound_and_says_whence_and_when(name: str) -> None:
    config = load_config(SBATCH / "recipes" / f"{name}.toml")
    assert list(rule_problems(config)) == []
    assert {"# When: "} <= {line[:8] for line in header(name).splitlines()}
    assert re.search(r"arXiv \d{4}\.\d{5}|\(20\d\d\)", header(name))
    wanted = (
        {ACTOR, ROLLOUT} | ({REFERENCE} if name in WITH_REFERENCE else set()) | ({CRITIC} if name == "ppo" else set())
    )
    assert {role.name for role in running_roles(config)} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_in_its_header_is_that_of_the_plan(name: str) -> None:
    """7B on GPUs of 80 GB, of which 79.1 GiB can be used."""
    config = load_config(SBATCH / "recipes" / f"{name}.toml")
    found = account(config, dict.fromkeys(ROLES, shape_of(SHAPES["7B"])), int(79.1 * GIB))
    phases = ("generation", "actor update") if config.train.colocate_all else (ROLLOUT, ACTOR)
    needed = [next(row.needed for row in found.rows if phase in row.name) / GIB for phase in phases]
    said = re.search(r"by estimate (\d+) GiB of .*?, (\d+) ", header(name))
    assert said is not None
    assert [int(number) for number in said.groups()] == pytest.approx(needed, abs=1)
    assert all(row.needed <= 79.1 * GIB for row in found.rows)


@pytest.mark.parametrize("name", NAMES)
def test_the_quickstart_over_a_recipe_keeps_its_algorithm_and_nothing_of_its_cluster(name: str) -> None:
    recipe = load_config(SBATCH / "recipes" / f"{name}.toml")
    both = load_config([SBATCH / "recipes" / f"{name}.toml", QUICKSTART])
    assert list(rule_problems(both)) == []
    assert both.algo.advantage.estimator == recipe.algo.advantage.estimator
    assert (both.algo.kl, both.actor.policy_loss_type) == (recipe.algo.kl, recipe.actor.policy_loss_type)
    assert both.vllm.sync_mode == recipe.vllm.sync_mode
    quickstart = load_config(QUICKSTART)
    for group in ("data", "ref", "eval"):
        assert getattr(both, group) == getattr(quickstart, group)
    assert (both.ds.param_dtype, both.ds.enable_sleep) == ("fp32", False)
    assert [role.ranks(both) for role in running_roles(both)] == [1] * len(running_roles(both))


def test_an_unknown_recipe_is_told_before_anything_is_made() -> None:
    done = subprocess.run(
        ["bash", str(SBATCH / "quickstart.sh"), "--recipe=grop"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 1
    assert "sbatch/recipes/grop.toml. Recipes: async_grpo cispo" in done.stderr


def test_later_files_count_and_each_keeps_its_paths(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    first, second = tmp_path / "below" / "first.toml", tmp_path / "second.toml"
    first.write_text('[data]\nprompt_dataset = "a.jsonl"\nmax_len = 7\n[train]\nseed = 1\n')
    second.write_text("[data]\nmax_len = 9\n")
    config = load_config([first, second], ["--train.seed=3"])
    assert (config.data.prompt_dataset, config.data.max_len, config.train.seed) == (
        str(tmp_path / "below/a.jsonl"),
        9,
        3,
    )
    assert Path(config.run_dir).name == "second"
    second.write_text("[data]\nmax_length = 9\n")
    with pytest.raises(ConfigError, match=r"second\.toml: unknown key data\.max_length"):
        load_config([first, second])

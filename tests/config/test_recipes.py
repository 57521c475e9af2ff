"""The recipes: each parses, holds what its header says, and can be laid under a file of a user's own."""

from __future__ import annotations

import re
import tomllib
from functools import reduce
from pathlib import Path

import pytest
from model_configs import SHAPES
from programs import completed

from slurm_rlhf.algorithms.policy_losses import aggregation_of, clip_range
from slurm_rlhf.cli.plan import layout_on
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ACTOR, CRITIC, REFERENCE, ROLES, ROLLOUT, algorithm_of, running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.gpus import find_gpu
from slurm_rlhf.placement.memory import account
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_memory import GIB

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
RECIPES = sorted(path.stem for path in (SBATCH / "recipes").glob("*.toml"))
NAMES = [
    *("async_grpo", "cispo", "code_grpo", "dapo", "distill", "dr_grpo", "grpo"),
    *("grpo_lora", "gspo", "ppo", "reinforce_pp", "rloo", "tools_grpo"),
]
WITH_A_TASK = {"code_grpo", "distill"}
"""Recipes that bring a reward or a teacher of their own, and so do not lie under the quickstart."""
WITH_REFERENCE = {"distill", "ppo", "reinforce_pp", "rloo"}
QUICKSTART = SBATCH / "quickstart.toml"

GRPO: dict[str, object] = {
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0.0,
    "rollout.n_samples_per_prompt": 8,
}
MAKES: dict[str, dict[str, object]] = {
    "async_grpo": GRPO | {"vllm.sync_mode": "inflight", "train.async_queue_size": 4, "algo.correction.preset": "tis"},
    "cispo": GRPO | {"actor.policy_loss_type": "cispo", "ds.fp32_lm_head": True, "train.batch_size": 128},
    "code_grpo": GRPO | {"reward.preset": "code", "reward.workers": 16},
    "dapo": GRPO
    | {
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.loss_agg_mode": "token-mean",
        "actor.learning_rate": 1e-6,
        "algo.dynamic_filtering_enable": True,
        "reward.overlong_buffer_len": 4096,
        "reward.overlong_penalty_factor": 1.0,
        "rollout.max_new_tokens": 20480,
        "rollout.batch_size": 512,
        "rollout.n_samples_per_prompt": 16,
        "train.batch_size": 512,
    },
    "distill": GRPO | {"rollout.n_samples_per_prompt": 4, "algo.distill.model_name_or_path": "../../models/Teacher-7B"},
    "dr_grpo": GRPO | {"algo.advantage.estimator": "dr_grpo"},
    "grpo": GRPO,
    "grpo_lora": GRPO | {"lora.rank": 32, "lora.alpha": 32.0, "actor.learning_rate": 1e-5},
    "gspo": GRPO | {"actor.policy_loss_type": "gspo", "train.batch_size": 128},
    "ppo": {
        "algo.advantage.estimator": "gae",
        "algo.advantage.lambd": 0.95,
        "algo.kl.init_coef": 0.01,
        "critic.learning_rate": 9e-6,
    },
    "reinforce_pp": {
        "algo.advantage.estimator": "reinforce",
        "algo.kl.init_coef": 0.01,
        "algo.kl.estimator": "k2",
        "rollout.n_samples_per_prompt": 1,
    },
    "rloo": {"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.03, "rollout.n_samples_per_prompt": 4},
    "tools_grpo": GRPO | {"env.max_turns": 6, "data.apply_chat_template": True},
}
"""Recipe -> the keys that make it what it is. They are written in its file, whatever the defaults are."""


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
def test_a_recipe_has_written_down_what_makes_it_what_it_is(name: str) -> None:
    """And what follows from it: the clip range, and how the losses of tokens become one number."""
    table = tomllib.loads((SBATCH / "recipes" / f"{name}.toml").read_text(encoding="utf-8"))
    written = {key: reduce(lambda group, part: group.get(part, {}), key.split("."), table) for key in MAKES[name]}
    assert written == MAKES[name]
    config = load_config(SBATCH / "recipes" / f"{name}.toml")
    actor, loss = config.actor, config.actor.policy_loss_type
    ranges = {"cispo": (1.0, 4.0), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}
    assert clip_range(loss, actor.eps_clip_low_high, actor.eps_clip) == ranges.get(name, (0.2, 0.2))
    modes = {"dr_grpo": "seq-mean-token-sum-norm", "gspo": "seq-mean-token-mean"}
    usual = algorithm_of(config).aggregation
    assert aggregation_of(actor.loss_agg_mode, loss, usual) == modes.get(name, "token-mean")


@pytest.mark.parametrize("name", NAMES)
def test_the_gpus_in_its_header_are_those_of_its_plan_and_all_are_used(name: str) -> None:
    config = load_config(SBATCH / "recipes" / f"{name}.toml")
    said = re.search(r"^# 7B on one node of (\d+) x (\d+) GB: ", header(name), re.MULTILINE)
    planned = re.search(r" plan sbatch/recipes/(\w+)\.toml --nodes=1 --gpus_per_node=(\d+) --gpu=(\w+)\n", header(name))
    assert (planned[1], planned[2]) == (name, said[1])
    gpu = find_gpu(planned[3])
    assert 0 <= int(said[2]) - gpu.memory_gib < 1
    layout = layout_on(config, ["n1"], [int(said[1])])
    taken = {slot for shares in layout.roles.values() for share in shares for slot in share.gpus}
    assert taken == set(range(int(said[1])))
    if shared := re.search(r"of each of the (\d+) GPUs with an engine, \d+ of the (\d+) that train", header(name)):
        assert [int(count) for count in shared.groups()] == [layout.worlds[ROLLOUT], layout.worlds[ACTOR]]


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_in_its_header_is_that_of_the_plan(name: str) -> None:
    """7B on GPUs of 80 GB, of which 79.1 GiB can be used."""
    config = load_config(SBATCH / "recipes" / f"{name}.toml")
    found = account(config, dict.fromkeys(ROLES, shape_of(SHAPES["7B"])), int(79.1 * GIB))
    phases = ("generation", "actor update") if config.train.colocate_all else (ROLLOUT, ACTOR)
    needed = [next(row.needed for row in found.rows if phase in row.name) / GIB for phase in phases]
    said = re.search(r"by estimate (\d+) GiB of .*?, (\d+) ", header(name))
    assert [int(number) for number in said.groups()] == pytest.approx(needed, abs=1)
    assert all(row.needed <= 79.1 * GIB for row in found.rows)


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITH_A_TASK))
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


def test_an_unknown_recipe_is_reported_before_anything_is_made() -> None:
    done = completed(["bash", str(SBATCH / "quickstart.sh"), "--recipe=grop"])
    assert done.returncode == 1
    assert "sbatch/recipes/grop.toml. Recipes: async_grpo cispo" in done.stderr


def test_later_files_count_and_each_keeps_its_paths(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    first, second = tmp_path / "below" / "first.toml", tmp_path / "second.toml"
    first.write_text('[data]\nprompt_dataset = "a.jsonl"\nmax_len = 7\n[train]\nseed = 1\n')
    second.write_text("[data]\nmax_len = 9\n")
    config = load_config([first, second], ["--train.seed=3"])
    assert config.data.prompt_dataset == str(tmp_path / "below/a.jsonl")
    assert (config.data.max_len, config.train.seed) == (9, 3)
    assert Path(config.run_dir).name == "second"
    second.write_text("[data]\nmax_length = 9\n")
    with pytest.raises(ConfigError, match=r"second\.toml: unknown key data\.max_length"):
        load_config([first, second])

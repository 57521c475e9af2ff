"""Names of OpenRLHF's flags, and whole commands of it: every row is a key and loads; what has no key is explained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from config_files import refused, write

from slurm_rlhf.config.keys import INTERVALS, VALUES, all_keys, get, nearest, peers, read_as, spellings, tables
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.rules import out_of_range
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.docs.pages import page
from slurm_rlhf.errors import ConfigError

FLAGS = tables()["openrlhf"]
HERE = [flag for flag in FLAGS if "key" in flag]
ELSEWHERE = [flag for flag in FLAGS if "key" not in flag]
VERL, TRL = peers()["verl"]["keys"], peers()["trl"]["keys"] | peers()["trl"]["train"]["keys"]
UNITS = peers()["verl"]["units"] | peers()["trl"]["units"]
OTHER = {"int": 7, "float": 0.25, "bool": True, "str": "word", "list[float]": [0.25, 0.75], "list[str]": ["word"]}


def sample(key: str) -> tuple[str, object]:
    """(what a user writes behind `=`, what the key then holds), of another value than the default."""
    kind, default, choices = all_keys()[key].kind, all_keys()[key].default, all_keys()[key].choices
    if choices:
        other = next(choice for choice in choices if choice != default)
        return other, other
    if kind == "path":
        return "/some/where", "/some/where"
    value = OTHER[kind] if OTHER[kind] != default else False
    return str(value).lower().strip("['] "), value


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_row_is_a_key_or_says_what_to_do_instead() -> None:
    for flag in FLAGS:
        assert set(flag) <= {"now", "before", "key", "instead"}
        assert bool(flag.get("key")) != bool(flag.get("instead")), flag
        assert all(spellings(flag)), flag
        assert "key" not in flag or flag["key"] in all_keys(), flag
        assert "key" in flag or not set(spellings(flag)) & all_keys().keys(), f"{flag}: it is a key by now"
    names = [name for flag in FLAGS for name in set(spellings(flag))]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_flag_with_the_name_of_a_key_is_that_key() -> None:
    for flag in HERE:
        for name in spellings(flag):
            assert name not in all_keys() or name == flag["key"], flag


def test_keys_that_the_explanations_name_are_keys() -> None:
    texts = " ".join(flag["instead"] for flag in ELSEWHERE)
    named = set(
        re.findall(r"\b(?:actor|critic|ref|reward|rollout|vllm|ds|algo|train|eval|ckpt|sync|logger)(?:\.\w+)+", texts)
    )
    assert len(named) > 10
    assert named - all_keys().keys() == set()


def test_defaults_that_openrlhfs_users_rely_on() -> None:
    """The page about migration says which differ; lambd is 1 in both (0.95 is the paper's)."""
    config, actor = Config(), Config().actor
    assert config.algo.advantage.lambd == 1.0
    assert (actor.learning_rate, config.critic.learning_rate) == (1e-6, 9e-6)
    assert (actor.eps_clip, config.critic.value_clip, config.algo.kl.init_coef) == (0.2, 0.5, 0.01)
    assert (actor.lr_scheduler, actor.lr_warmup_ratio, actor.lr_min_ratio) == ("constant", 0.0, 0.1)


def test_the_page_about_migration_has_the_table() -> None:
    section = page("migration").split("## From OpenRLHF")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \| `([\w.]+)` \|$", section, re.MULTILINE)
    found = [(tuple(re.findall(r"`--([\w.]+)`", flags)), key) for flags, key in rows]
    assert found == [(tuple(spellings(flag)), flag["key"]) for flag in HERE]


def test_the_readme_has_the_flags_that_are_called_otherwise_here() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([\w.]+)` \| `([\w.]+)` \|$", readme, re.MULTILINE)
    assert rows == [(flag["now"], flag["key"]) for flag in HERE if flag.get("now", flag["key"]) != flag["key"]]


# --- in files and on the command line --------------------------------------------------------------------------------


def test_every_alias_loads_from_a_file_and_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(read_as()) > 80
    for alias, key in read_as().items():
        written, value = sample(key)
        quoted = f'"{written}"' if isinstance(value, str) else json.dumps(value) if isinstance(value, list) else written
        from_file = load_config(write(tmp_path, f"{alias} = {quoted}"))
        from_words = load_config(None, [f"--{alias}={written}"])
        assert get(from_file, key) == get(from_words, key) == value != all_keys()[key].default, alias
        stated = capsys.readouterr().err.splitlines()
        assert stated[0].endswith(f"run.toml: {alias}, a name of OpenRLHF, is {key} here")
        assert stated[1:] == [f"note: the command line: --{alias}, a name of OpenRLHF, is {key} here"]


def test_names_of_ours_are_not_remarked_upon_and_need_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables.cache_clear()
    read_as.cache_clear()
    load_config(write(tmp_path, dump_toml(Config())), ["--actor.learning_rate=1"])
    assert capsys.readouterr().err == ""
    assert tables.cache_info().currsize == 0


def test_flags_and_lists_without_an_equals_sign() -> None:
    words = ["--actor.adam.betas", "0.5", "0.6", "--colocate_all_models", "--pretrain", "/model"]
    config = load_config(None, words)
    assert config.actor.adam_betas == [0.5, 0.6]
    assert config.train.colocate_all is True
    assert config.actor.model_name_or_path == "/model"


def test_a_group_of_openrlhf_is_a_table(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[actor]\nmax_norm = 2\n[actor.adam]\nlr = 1e-5\nbetas = [0.5, 0.6]"))
    assert (config.actor.learning_rate, config.actor.adam_betas, config.actor.max_norm) == (1e-5, [0.5, 0.6], 2.0)


def test_the_command_line_overrides_a_file_in_either_spelling(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "train.seed = 1"), ["--seed=2"]).train.seed == 2
    assert load_config(write(tmp_path, "seed = 1"), ["--train.seed=2"]).train.seed == 2
    assert load_config(None, ["--seed=1", "--seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--actor.learning_rate=1", "--actor_learning_rate=1"],
            "the command line: --actor.learning_rate and --actor_learning_rate are the same key, actor.learning_rate: "
            "leave one out",
        ),
        (
            ["--actor_learning_rate=1", "--actor.adam.lr=1"],
            "--actor_learning_rate and --actor.adam.lr are the same key, actor.learning_rate",
        ),
        (["--actor_learning_rate=x"], "--actor.learning_rate takes a number, got 'x' (as --actor_learning_rate)"),
        (
            ["--vllm_sync_backend=ray"],
            "--sync.backend takes one of auto, gloo, nccl, ipc, disk, got 'ray' (as --vllm_s",
        ),
        (
            ["--vllm_sync_with_ray"],
            "unknown key --vllm_sync_with_ray: OpenRLHF's vllm_sync_with_ray is no key here: no ",
        ),
        (["--vllm.sync_with_ray"], "is no key here: no Ray starts processes here: sync.backend chooses how weights go"),
        (["--micro_train_batch_size=4"], "cut by tokens, not by sequences: use train.max_tokens_per_gpu"),
        (["--critic.adam.betas", "0.9", "0.95"], "actor and critic share it: use actor.adam_betas"),
        (["--algorithm.adv_estimator=grpo"], "verl's algorithm.adv_estimator is algo.advantage.estimator here"),
        (["--actor_lerning_rate=1"], "unknown key --actor_lerning_rate; did you mean --actor.learning_rate?"),
    ],
)
def test_what_is_wrong_is_said_in_words_that_the_user_knows(words: list[str], problem: str) -> None:
    stated = refused(None, *words)
    assert problem in stated
    assert "\n" not in stated


def test_the_same_key_twice_in_a_file(tmp_path: Path) -> None:
    stated = refused(write(tmp_path, "lambd = 0.9\n[algo.advantage]\nlambd = 0.95"))
    assert stated.endswith("lambd and algo.advantage.lambd are the same key, algo.advantage.lambd: leave one out")


def test_tables_of_others_are_explained_key_by_key(tmp_path: Path) -> None:
    stated = refused(write(tmp_path, "[ds]\nload_in_4bit = true\n[actor_rollout_ref.rollout]\nn = 4\n[zzz.a]\nb = 1"))
    assert (
        "unknown key ds.load_in_4bit: OpenRLHF's ds.load_in_4bit is no key here: all parameters are trained" in stated
    )
    assert "unknown key actor_rollout_ref.rollout.n: verl's actor_rollout_ref.rollout.n is rollout.n_samples" in stated
    assert "unknown key zzz.a.b (`slurm-rlhf train --help` names all keys)" in stated


def test_values_of_others_are_said_in_ours_and_are_none_of_ours() -> None:
    for name, values in VALUES.items():
        for theirs, ours in values.items():
            assert theirs not in all_keys()[name].choices
            assert ours in all_keys()[name].choices
            with pytest.raises(ConfigError, match=f"got '{theirs}': it is called {ours} here"):
                load_config(None, [f"--{name}={theirs}"])


def test_an_interval_of_minus_one_is_warned_that_never_is_zero() -> None:
    for name in INTERVALS:
        stated = list(out_of_range(load_config(None, [f"--{name}=-1"])))
        assert stated == [f"{name} must be at least 0, got -1; never is 0 here"]


def test_names_of_verl_and_trl_lead_to_keys_and_say_where_numbers_differ(tmp_path: Path) -> None:
    assert {name: key for name, key in {**VERL, **TRL}.items() if key not in all_keys()} == {}
    assert (VERL.keys() | TRL.keys()) & all_keys().keys() == set()
    assert {name: key for name, key in {**VERL, **TRL}.items() if read_as().get(name, key) != key} == {}
    assert UNITS.keys() <= VERL.keys() | TRL.keys()
    stated = refused(write(tmp_path, "num_generations = 4\nactor_rollout_ref.actor.ppo_mini_batch_size = 8"))
    assert "TRL's num_generations is rollout.n_samples_per_prompt here (`" in stated
    assert "ppo_mini_batch_size is train.batch_size here; verl counts prompts, this key responses" in stated
    stated = refused(write(tmp_path, "generation_batch_size = 8\nscale_rewards = true\nvllm_mode = 'colocate'"))
    assert "rollout.batch_size here; TRL counts responses, this key prompts" in stated
    assert "algo.advantage.no_std_norm here; true there is false here" in stated
    assert "TRL's vllm_mode is train.colocate_all here" in stated


def test_a_name_that_is_near_nothing_is_not_guessed_at() -> None:
    for name in ("num_generations", "xyzzy", "tau", "foo"):
        assert nearest(name) == []
    assert nearest("temprature") == ["rollout.temperature", "eval.temperature"]
    assert nearest("actor.learnign_rate") == ["actor.learning_rate"]
    assert nearest("reward.preflight") == ["preflight", "timeout.preflight"]  # the same word, and not reward.preset


@pytest.mark.parametrize(
    "words", ["--lora.use_dora", "--lora.bias=all", "--lora.modules_to_save score norm", "--use_dora"]
)
def test_what_vllm_does_not_serve_is_named(words: str) -> None:
    name = re.split("[ =]", words)[0]
    served = f"unknown key {name}: vLLM serves no adapters with .*: leave the key out, or train all parameters"
    assert re.search(served, refused(None, *words.split()))

"""TOML and command line to Config and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from config_files import refused, write
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rlhf.algorithms.registry import built_in
from slurm_rlhf.config.keys import Key, all_keys, documentation, get, put
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import EvalDataSet
from slurm_rlhf.config.schema_models import RewardPart
from slurm_rlhf.config.text import dump_toml, help_text


def test_file_then_command_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        resume = "never"
        train.seed = 7
        [actor]
        learning_rate = 1
        adam_betas = [0.8, 1]
        [algo.kl]
        init_coef = 0.5
        [rollout]
        stop = ["\\n", "a,b"]
        """,
    )
    config = load_config(file, ["--train.seed=8", "--actor.num_nodes", "2"])
    assert (config.resume, config.train.seed, config.actor.num_nodes) == ("never", 8, 2)
    assert config.actor.learning_rate == 1.0
    assert isinstance(config.actor.learning_rate, float)
    assert config.actor.adam_betas == [0.8, 1.0]
    assert config.algo.kl.init_coef == 0.5
    assert config.rollout.stop == ["\n", "a,b"]
    assert config.critic == Config().critic


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--train.full_determinism"], "train.full_determinism", True),
        (["--train.full_determinism", "--train.seed=3"], "train.full_determinism", True),
        (["--train.full_determinism", "False"], "train.full_determinism", False),
        (["--train.full_determinism=true"], "train.full_determinism", True),
        (["--rollout.top_k", "-1"], "rollout.top_k", -1),
        (["--actor.learning_rate=1e-6"], "actor.learning_rate", 1e-6),
        (["--actor.learning_rate=1"], "actor.learning_rate", 1.0),
        (["--actor.eps_clip_low_high", "0.2", "0.3"], "actor.eps_clip_low_high", [0.2, 0.3]),
        (["--actor.eps_clip_low_high=0.2,0.3"], "actor.eps_clip_low_high", [0.2, 0.3]),
        (["--actor.eps_clip_low_high=[0.2, 0.3]"], "actor.eps_clip_low_high", [0.2, 0.3]),
        (["--reward.clip_range", "-5", "5"], "reward.clip_range", [-5.0, 5.0]),
        (["--rollout.stop", "a,b", "c"], "rollout.stop", ["a,b", "c"]),
        (["--lora.target_modules=q_proj,v_proj"], "lora.target_modules", ["q_proj", "v_proj"]),
        (["--rollout.stop=--"], "rollout.stop", ["--"]),
        (['--rollout.stop=["\\n"]'], "rollout.stop", ["\n"]),
        (["--rollout.stop=[]"], "rollout.stop", []),
        (["--data.input_template=a=b {}"], "data.input_template", "a=b {}"),
        (["--data.input_key="], "data.input_key", ""),
        (["--actor.loss_agg_mode="], "actor.loss_agg_mode", ""),
        (["--train.seed=1", "--train.seed=2"], "train.seed", 2),
    ],
)
def test_overrides(words: list[str], key: str, value: Any) -> None:
    got = get(load_config(None, words), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[actor]\nlearning_rat = 1", ["actor.learning_rat", "actor.learning_rate"]),
        ("[aktor]\nlearning_rate = 1", ["aktor.learning_rate", "actor.learning_rate"]),
        ("learning_rate = 1", ["actor.learning_rate or critic.learning_rate or sft.learning_rate"]),
        ("actor_nmu_nodes = 1", ["did you mean actor.num_nodes?"]),
        ("[vllm]\ntensor-parallel-size = 1", ["did you mean vllm.tensor_parallel_size?"]),
        ("[algo.kl]\ninit_koef = 1", ["did you mean algo.kl.init_coef?"]),
        ("[zzz]", ["unknown key zzz (`slurm-rlhf train --help` names all keys)"]),
        ("[sync]\ncompare = 3", ["unknown key sync.compare"]),  # it is gone
        ("[train.seed]\nx = 1", ["train.seed takes a whole number, got a table"]),
        ("actor = 1", ["actor is a group of keys"]),
        ("[train]\nseed = '1'", ["train.seed takes a whole number, got '1': write 1"]),
        ("[train]\nseed = 2.0", ["train.seed", "2.0: write 2"]),
        ("[train]\nseed = true", ["train.seed takes a whole number, got true"]),
        ("[train]\nfull_determinism = 1", ["train.full_determinism takes true or false, got 1"]),
        ("[train]\nfull_determinism = 'true'", ["leave out the quotes"]),
        ("[actor]\nlearning_rate = '1e-6'", ["actor.learning_rate takes a number, got '1e-6': leave out the quotes"]),
        ("[actor]\nlearning_rate = nan", ["actor.learning_rate takes a number, got nan"]),
        ("[actor]\nlearning_rate = -inf", ["got -inf"]),
        ("[actor]\nadam_betas = 0.9", ["actor.adam_betas takes a list of numbers, got 0.9"]),
        ("[actor]\nadam_betas = [0.9, 'x']", ["actor.adam_betas takes a list of numbers"]),
        ("[actor]\nlr_scheduler = 'cosin'", ["one of constant, linear, cosine, got 'cosin'"]),
        ("reward.sources = [{name = 'a', preset = 'mth'}]", ["reward.sources: preset takes one of", "got 'mth'"]),
        ("run_dir = 5", ["run_dir takes a path (a string), got 5"]),
        (f"run_dir = 'a/{'x' * 256}/b'", ["run_dir: 'xxx", "names no file: names have at most 255 bytes"]),
        (f"train.plugins = ['a.py', '{'é' * 128}']", ["train.plugins: 'éé", "names no file"]),
        ("[data]\ninput_key = 2020-01-01", ["data.input_key takes a string"]),
        ("[actor\n", ["not valid TOML", "line 1"]),
        ("[actor]\nnum_nodes = 1\nnum_nodes = 2\n", ["not valid TOML", "line 3"]),
    ],
)
def test_bad_file(tmp_path: Path, text: str, named: list[str]) -> None:
    file = write(tmp_path, text)
    message = refused(file)
    assert str(file) in message
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--actor.learning_rat=1"], "unknown key --actor.learning_rat; did you mean --actor.learning_rate?"),
        (["--train.seed=x"], "--train.seed takes a whole number, got 'x'"),
        (["--train.seed=1e3"], "got '1e3': write 1000"),
        (["--train.seed"], "--train.seed takes a whole number, got nothing"),
        (["--train.seed", "--train.max_steps=1"], "--train.seed takes a whole number, got nothing"),
        (["--train.full_determinism=yes"], "takes true or false, got 'yes'"),
        (["--train.full_determinism", "yes"], "'yes' belongs to no key"),
        (["--actor.adam_betas=x,1"], "--actor.adam_betas takes a list of numbers, got 'x,1'"),
        (["--actor.adam_betas=[0.9"], "--actor.adam_betas takes a list of numbers, got '[0.9'"),
        (["--actor.learning_rate=inf"], "takes a number, got inf"),
        (["--actor=1"], "--actor is a group of keys"),
        (["--actor.policy_loss_type=grpo"], "policy_loss_type takes one of ppo, gspo, cispo, sapo, dppo_tv"),
        (["--actor.loss_agg_mode=mean"], 'loss_agg_mode takes one of "", token-mean, seq-mean-token-mean, '),
        (["train.seed=1"], "'train.seed=1' belongs to no key: overrides look like --train.seed=1"),
        (["--"], "'--' belongs to no key"),
        (["--data.input_key=\udcff"], "--data.input_key takes a string, got '\\udcff'"),
    ],
)
def test_bad_override(words: list[str], named: str) -> None:
    message = refused(None, *words)
    assert "the command line: " in message
    assert named in message


def test_all_problems_at_once(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "[train]\nsead = 1\nbatch_size = 'x'"), "--foo.bar=1")
    assert message.startswith("3 problems in the configuration:")
    assert all(part in message for part in ("train.sead", "train.batch_size", "--foo.bar"))


@pytest.mark.parametrize("kind", ["missing", "directory", "binary"])
def test_unreadable_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "run.toml"
    if kind == "directory":
        file.mkdir()
    elif kind == "binary":
        file.write_bytes(b"a = '\xff'")
    expected = {"missing": "no such file", "directory": "cannot be read", "binary": "not UTF-8 text"}[kind]
    assert f"{file}: {expected}" in refused(file)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write(
        there, 'actor.model_name_or_path = "../m"\nreward.remote_url = "https://x/y"\neval.dataset = "~/e"', "a.b.toml"
    )
    config = load_config(file, ["--data.prompt_dataset", "p.jsonl"])
    assert config.actor.model_name_or_path == str(tmp_path / "m")
    assert config.data.prompt_dataset == str(here / "p.jsonl")
    assert config.reward.remote_url == "https://x/y"
    assert config.eval.dataset == str(tmp_path / "home" / "e")
    assert config.run_dir == str(here / "runs" / "a.b")
    assert (config.resume, config.critic.model_name_or_path) == ("auto", "")
    assert load_config(file, ["--run_dir=x"]).run_dir == str(here / "x")
    assert load_config(file, ["--resume=c"]).resume == str(here / "c")


def values(key: Key) -> st.SearchStrategy[Any]:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    data_sets = st.builds(
        EvalDataSet,
        path=st.sampled_from(['/a "b"/ü', "/x"]),
        name=text,
        temperature=st.none() | numbers,
        pass_k=st.none() | st.lists(st.integers(), max_size=2),
        answer_pattern=st.none() | text,
    )
    parts = st.builds(
        RewardPart,
        name=text,
        weight=numbers,
        clip=st.lists(numbers, min_size=2, max_size=2, unique=True).map(sorted) | st.just([]),
        remote_url=st.sampled_from(["", '/a "b"/ü', "http://h:1,https://i"]),
        preset_value=text,
        model=st.booleans(),
    )
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "str": st.sampled_from(key.choices) if key.choices else text,
        # Paths are made absolute once; the NUL byte cannot be in one.
        "path": st.sampled_from(["", '/a "b"/ü', "/x\\y\n\x7f"]),
        "int": st.integers(),
        "float": numbers,
        "bool": st.booleans(),
        "list[int]": st.lists(st.integers(), max_size=3),
        "list[part]": st.lists(parts, max_size=2),
        "list[dataset]": st.lists(data_sets, max_size=2),
        "list[float]": st.lists(numbers, max_size=3),
        "list[str]": st.lists(text, max_size=3),
        "list[path]": st.lists(st.sampled_from(['/a "b"/ü', "/x\\y\n\x7f"]), max_size=3),
    }
    return kinds[key.kind]


@settings(deadline=None)
@given(st.data())
def test_dump_reads_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    config = Config()
    for name in data.draw(st.lists(st.sampled_from(sorted(all_keys())), max_size=12)):
        put(config, name, data.draw(values(all_keys()[name]), label=name))
    config.run_dir = "/r"
    file = write(tmp_path_factory.getbasetemp(), dump_toml(config), "round.toml")
    assert asdict(load_config(file, [])) == asdict(config)


def test_dump_is_a_file_a_user_could_have_written(tmp_path: Path) -> None:
    text = dump_toml(load_config(write(tmp_path, ""), []))
    assert '\n[actor]\nmodel_name_or_path = ""\nnum_nodes = 1\n' in text
    assert "\nlearning_rate = 1e-06\n" in text
    assert "\n[algo.kl]\ninit_coef = 0.01\n" in text


def test_defaults_have_the_types_of_their_keys() -> None:
    from slurm_rlhf.config.text import from_toml

    for key in all_keys().values():
        assert from_toml(key, key.default) == key.default, key.name


def test_every_key_is_documented() -> None:
    missing = [name for name in all_keys() if not documentation().get(name)]
    assert missing == []


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_key_is_in_the_help(width: int) -> None:
    text = help_text(width=width)
    for name in all_keys():
        assert f"  --{name} " in text
    assert max(len(line) for line in text.splitlines()) <= max(width, 60)


def test_groups_and_entries_come_with_their_docstring() -> None:
    lines = help_text(["algo"], width=100).splitlines()
    assert lines[0] == "algo.advantage:"
    [entry] = [line for line in lines if "algo.advantage.gamma" in line]
    assert entry.split() == ["--algo.advantage.gamma", "NUMBER", "Discount", "per", "token.", "[1.0]"]
    assert not [line for line in lines if "--train." in line]
    assert "timeout: The one table of time-outs, in seconds." in help_text(["timeout"])


@pytest.mark.parametrize(
    "words",
    [
        ['--logger.use=["tensorboard", "wandb"]'],
        ["--logger.use=[tensorboard, wandb]"],
        ["--logger.use=[tensorboard,wandb]"],
        ["--logger.use=tensorboard,wandb"],
        ["--logger.use", "tensorboard", "wandb"],
    ],
)
def test_a_list_of_names_is_read_as_people_write_it(words: list[str]) -> None:
    assert load_config(None, words).logger.use == ["tensorboard", "wandb"]
    assert load_config(None, ["--rollout.stop=a, b"]).rollout.stop == ["a, b"]  # which may hold a comma


def test_every_number_has_a_range_that_holds_its_default() -> None:
    numbers = {name for name, key in all_keys().items() if key.kind in ("int", "float", "list[int]", "list[float]")}
    ranges = {name: key.allowed for name, key in all_keys().items() if key.allowed is not None}
    assert set(ranges) == numbers
    for name, allowed in ranges.items():
        default, words = all_keys()[name].default, all_keys()[name].words
        values = default if isinstance(default, list) else [default]
        assert all(value in words or value in allowed for value in values), name
        assert float("nan") not in allowed  # noqa: PLW0177


def test_the_help_names_every_algorithm_that_is_built_in() -> None:
    text = documentation()["algo.advantage.estimator"]
    assert [name for name in built_in() if name not in text] == []


def test_a_key_that_went_is_left_out_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of earlier versions have every key in their config.toml."""
    file = write(tmp_path, "[train]\nshare_prompts = false\nseed = 7")
    config = load_config(file, ["--train.share_prompts", "--train.max_steps=3"])
    assert (config.train.seed, config.train.max_steps) == (7, 3)
    file_note, word_note = capsys.readouterr().err.splitlines()
    assert f"{file}: train.share_prompts is left out: every response" in file_note
    assert "the command line: --train.share_prompts is left out" in word_note

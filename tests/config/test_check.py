"""Files and model directories of a configuration, and that all problems come in one round."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from model_configs import NO_WEIGHTS, tensors
from packed_rows import edit_config
from waiting import HANG_S

from slurm_rlhf.config.check import check, check_stage, warnings
from slurm_rlhf.config.keys import all_keys, put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import from_text
from slurm_rlhf.errors import ConfigError, ModelError

COLOCATED = (
    "critic has 1 x 1 slots, the actor 1 x 8: set critic.num_nodes = 1 and critic.num_gpus_per_node = 8",
    "set ref.num_nodes = 1 and ref.num_gpus_per_node = 8",
    "vllm.num_engines * vllm.tensor_parallel_size is 1 * 1 = 1; engines inside a node: use 8 x 1 or 4 x 2 or 2 x 4 or",
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 48}
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048} | shape))
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    (model / "tokenizer.json").touch()
    for name in ("prompts.jsonl", "reward.py"):
        (tmp_path / name).touch()
    config = Config(run_dir=str(tmp_path / "run"))
    config.actor.model_name_or_path = str(model)
    config.data.prompt_dataset = config.sft.dataset = str(tmp_path / "prompts.jsonl")
    config.reward.remote_url = str(tmp_path / "reward.py")
    config.sft.output_dir = str(tmp_path / "out")
    return config


def change(config: Config, *words: str) -> Config:
    for word in words:
        name, _, value = word.partition("=")
        put(config, name, from_text(all_keys()[name], [value]))
    return config


def test_a_good_one(config: Config) -> None:
    check(config)
    check_stage(config, "sft")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.kernel_cache=/dev/null/x"], ["train.kernel_cache: /dev/null is a file, not a directory"]),
        (["train.kernel_cache="], ["train.kernel_cache is not set: name auto, none or a directory"]),
        (["vllm.tensor_parallel_size=3"], ["12 attention heads, 2 key-value heads", "Valid sizes: 1, 2, 4"]),
        (["data.prompt_dataset="], ["data.prompt_dataset is not set"]),
        (["data.prompt_dataset=/no/where"], ["data.prompt_dataset: no such file: /no/where"]),
        (["eval.dataset=/bin"], ["eval.dataset: /bin: a directory without files of rows"]),
        (
            ["reward.remote_url="],
            ["neither reward.remote_url (a Python file", "nor reward.function (one", "nor reward.model_name_or_path ("],
        ),
        (["reward.model_name_or_path=/rm"], ["reward.remote_url and reward.model_name_or_path are both set"]),
        (["reward.remote_url=/no.py"], ["reward.remote_url: no such file: /no.py"]),
        (["reward.remote_url=http://x,y"], ["reward.remote_url: 'y' is no http:// or https:// address"]),
        (["actor.model_name_or_path="], ["actor.model_name_or_path is not set"]),
        (["resume=/no/where"], ["resume takes auto, never or a checkpoint directory", "/no/where"]),
        (["run_dir="], ["run_dir is not set"]),
        (["run_dir=/dev/null/run"], ["run_dir: /dev/null is a file, not a directory", "/dev/null/run"]),
        (["train.colocate_all=true", "actor.num_gpus_per_node=8"], ["3 problems", *COLOCATED]),
    ],
)
def test_what_is_missing_or_broken_is_named(config: Config, words: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(change(config, *words))
    for part in named:
        assert part in str(caught.value)


def test_good_variants(config: Config) -> None:
    check(change(config, "rollout.batch_size=64", "rollout.n_samples_per_prompt=4", "actor.num_gpus_per_node=8"))
    check(change(config, "algo.kl.init_coef=0", "ref.num_gpus_per_node=3"))
    check(change(config, "data.input_template={{{}}}", "resume=never"))
    check(change(config, "rollout.temperature=0.01", "eval.temperature=0.001"))
    shape = ["actor.num_gpus_per_node=4", "critic.num_gpus_per_node=4", "vllm.num_engines=2"]
    shape += ["vllm.tensor_parallel_size=2", "ref.num_gpus_per_node=3", "algo.kl.init_coef=0"]
    check(change(config, "train.colocate_all=true", "ds.enable_sleep=true", "rollout.batch_size=128", *shape))
    change(config, "train.colocate_all=false", "ds.enable_sleep=false", "ref.num_gpus_per_node=1")
    check(change(config, "ds.zero_stage=0", "ds.param_dtype=bf16", "ref.zero_stage=3", "ref.offload=true"))


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("config.json", "is not a Hugging Face model: it holds no config.json"),
        ("model.safetensors", "holds no weights (none of model.safetensors"),
        ("tokenizer.json", "holds no tokenizer (tokenizer.json): save the model's tokenizer there"),
    ],
)
def test_incomplete_model(config: Config, missing: str, named: str) -> None:
    directory = Path(config.actor.model_name_or_path)
    (directory / missing).unlink()
    for rules in (check, partial(check_stage, stage="sft")):
        with pytest.raises(ModelError) as caught:
            rules(config)
        assert str(caught.value).startswith(f"actor.model_name_or_path: {directory} ")
        assert named in str(caught.value)


def test_an_adapter_next_to_the_config_of_its_base_is_no_model(config: Config) -> None:
    """Without weights of its own: some tools write the config.json of the base there."""
    directory = Path(config.actor.model_name_or_path)
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"use_dora": true}')
    with pytest.raises(ModelError, match=r"is a LoRA adapter and no whole model: put it into the model"):
        check(config)


def test_other_bad_models(config: Config, tmp_path: Path) -> None:
    directory = Path(config.actor.model_name_or_path)
    with pytest.raises(ModelError, match=r"max_len = 4096 is longer than the 2048 positions"):
        check(change(config, "data.max_len=4096"))
    change(config, "data.max_len=2048")
    critic = tmp_path / "critic"
    with pytest.raises(ModelError, match=r"critic\.model_name_or_path: no such directory.*hf download"):
        check(change(config, f"critic.model_name_or_path={critic}"))
    critic.mkdir()
    (critic / "config.json").write_text("{}")
    (critic / "model.safetensors").write_bytes(NO_WEIGHTS)
    check(config)  # a critic brings no tokenizer
    (critic / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        check(config)
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").touch()
    with pytest.raises(ModelError, match=r"slow tokenizer \(vocab\.json\) but no tokenizer\.json: convert it"):
        check(config)


def test_every_directory_of_the_run_is_checked_by_its_architecture(config: Config, tmp_path: Path) -> None:
    critic = tmp_path / "critic"
    critic.mkdir()
    (critic / "model.safetensors").write_bytes(NO_WEIGHTS)
    change(config, f"critic.model_name_or_path={critic}")
    for stated, body in {
        "is a PhiMoEForCausalLM, which cannot be trained here": {"architectures": ["PhiMoEForCausalLM"]},
        "is a bert, an encoder": {"model_type": "bert"},
        "longer than the 8 positions": {"max_position_embeddings": 8},
    }.items():
        (critic / "config.json").write_text(json.dumps(body))
        with pytest.raises(
            ModelError, match=f"critic.model_name_or_path.*{stated}|{stated}.*critic.model_name_or_path"
        ):
            check(config)
        change(config, "algo.advantage.estimator=reinforce", "train.num_episodes=2")
        check(config)  # no critic runs
        change(config, "algo.advantage.estimator=gae")
    actor = Path(config.actor.model_name_or_path) / "config.json"
    actor.write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ModelError, match="is a BertForMaskedLM, which is no causal language model"):
        check_stage(config, "sft")
    actor.write_text('{"architectures": ["Cohere2ForCausalLM"], "sliding_window": 9}')
    check_stage(config, "sft")  # vLLM samples nothing from it
    with pytest.raises(ModelError, match=r"vLLM, which samples, disagree by a token: lower data\.max_len = 2048 to 9"):
        check(config)


def test_a_model_that_was_never_compared_is_a_warning_for_whoever_tells_the_user(config: Config) -> None:
    assert warnings(config) == []
    (Path(config.actor.model_name_or_path) / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    check(config)
    (stated,) = warnings(config)
    assert stated.startswith("actor.model_name_or_path: ")
    assert "is a OtherForCausalLM, which was never compared" in stated


def test_keys_files_and_models_are_reported_in_one_round(config: Config) -> None:
    change(config, "data.prompt_dataset=/no/where", "reward.remote_url=/no.py", "train.seed=-1")
    change(config, "actor.model_name_or_path=/no/model", "critic.model_name_or_path=/no/critic")
    with pytest.raises(ConfigError) as caught:
        check(config)
    text = str(caught.value)
    assert text.startswith("5 problems in the configuration:")
    for part in ("train.seed", "/no/where", "/no.py", "no such directory: /no/model", "no such directory: /no/critic"):
        assert part in text


WHOLE = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


@pytest.mark.parametrize(
    ("name", "content", "stated"),
    [
        ("model.safetensors", b"", "is not a safetensors file: it is empty, or ends within its header"),
        ("model.safetensors", b"<html>404 Not Found", "is not a safetensors file: a header of"),
        ("model.safetensors", len(WHOLE).to_bytes(8, "little") + WHOLE + b"1234", "has 73 bytes, and by its header 77"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull` fetches them"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}',
            "names 2 of 2 files that are not there (one.safetensors, two.safetensors)",
        ),
        ("model.safetensors.index.json", b"{}", "cannot be read: KeyError"),
    ],
)
def test_weights_that_are_not_whole_are_reported_before_anything_starts(
    config: Config, name: str, content: bytes, stated: str
) -> None:
    directory = Path(config.actor.model_name_or_path)
    (directory / "model.safetensors").write_bytes(len(WHOLE).to_bytes(8, "little") + WHOLE + bytes(8))
    check(config)
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(content)
    for rules in (check, partial(check_stage, stage="sft")):
        with pytest.raises(ModelError) as caught:
            rules(config)
        assert str(caught.value).startswith(f"actor.model_name_or_path: {directory / name} ")
        assert stated in str(caught.value)


def test_a_reward_model_has_the_actors_tokens(config: Config, tmp_path: Path) -> None:
    directory = tmp_path / "rm"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 1024}')
    (directory / "model.safetensors").write_bytes(NO_WEIGHTS)
    change(config, "reward.remote_url=", f"reward.model_name_or_path={directory}")
    ours, theirs = Path(config.actor.model_name_or_path) / "tokenizer.json", directory / "tokenizer.json"
    with pytest.raises(ModelError, match=r"reward\.model_name_or_path: .* holds no tokenizer"):
        check(config)
    theirs.touch()
    with pytest.raises(ModelError, match=r"longer than the 1024 positions .* of reward\.model_name_or_path"):
        check(config)
    change(config, "data.max_len=1024", "rollout.max_new_tokens=512")
    with pytest.raises(ModelError, match=rf"{directory}: a reward model has one head .*; none of them is in it"):
        check(config)
    (directory / "model.safetensors").write_bytes(tensors({"score.weight": [1, 8]}))
    check(config)
    tokens = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]}
    ours.write_text(json.dumps(tokens))
    theirs.write_text(json.dumps({**tokens, "decoder": None}))
    check(config)
    tokens["added_tokens"] = [{"id": 3, "content": "<eos>"}]
    theirs.write_text(json.dumps(tokens))
    with pytest.raises(
        ModelError, match=r"another tokenizer .*\(token '<eos>' is 3 there and 2 here\).*reward function"
    ):
        check(config)


def test_a_model_without_an_output_head(config: Config) -> None:
    model = Path(config.actor.model_name_or_path)
    shape = {"vocab_size": 9, "tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | shape))
    stored = {"model.embed_tokens.weight": [9, 4], "model.norm.weight": [4]}
    (model / "model.safetensors").write_bytes(tensors(stored))
    for rules in (check, partial(check_stage, stage="sft")):
        with pytest.raises(ModelError, match=rf"actor\.model_name_or_path: {model} has no output head: .*vocab_size"):
            rules(config)
    (model / "model.safetensors").write_bytes(tensors(stored | {"lm_head.weight": [9, 4]}))
    check(config)


@pytest.mark.parametrize(
    ("layer", "words", "stated"),
    [
        ("self_attn.qkv_proj", "lora.target_modules=q_proj", "has no linear layers named q_proj; it has qkv_proj"),
        ("self_attn.qkv_proj", "lora.target_modules=qkv_proj", ""),
        ("self_attn.qkv_proj", "lora.target_modules=all-linear", ""),
        ("self_attn.qkv_proj", "lora.target_modules=lm_head", "named lm_head"),
        ("mlp.experts.0.up_proj", "lora.target_modules=all-linear", "has experts, for which there are no adapters"),
    ],
)
def test_layers_that_get_adapters_are_there(config: Config, layer: str, words: str, stated: str) -> None:
    model = Path(config.actor.model_name_or_path)
    described = json.loads((model / "config.json").read_text())
    named = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 9}
    (model / "config.json").write_text(json.dumps(described | named))
    stored = {"lm_head.weight": [9, 4], f"model.layers.0.{layer}.weight": [8, 4], "model.norm.weight": [4]}
    (model / "model.safetensors").write_bytes(tensors(stored))
    config.lora.rank = 8
    if not stated:
        return check(change(config, words))
    with pytest.raises(ModelError, match=re.escape(stated)) as caught:
        check(change(config, words))
    assert "actor.model_name_or_path" in str(caught.value)
    assert str(caught.value).count("lora.") == 1, "policy and critic start from one directory"
    return None


@pytest.mark.parametrize("kind", ["gpt2", "falcon"])
def test_models_without_linear_layers_get_no_adapters(config: Config, kind: str) -> None:
    edit_config(Path(config.actor.model_name_or_path), model_type=kind)
    for refuses in (check, partial(check_stage, stage="sft")):
        with pytest.raises(ModelError, match=r"lora\.rank: actor\.model_name_or_path = .* of the class Linear.* to 0"):
            refuses(change(config, "lora.rank=8"))
    check(change(config, "lora.rank=0"))


@pytest.mark.parametrize(
    ("field", "words", "stated"),
    [
        ({"model_type": "bloom"}, "ds.packing_samples=always", "ds.packing_samples = always .* {} .*(bloom)"),
        ({"mamba_d_state": 4}, "ds.packing_samples=always", "ds.packing_samples = always .* {} .*(mamba_d_state)"),
        ({"model_type": "qwen2"}, "ds.ulysses_size=5", "ds.ulysses_size = 5 does not divide the 12 .* of {}. Valid"),
        ({"model_type": "bloom"}, "ds.ulysses_size=2", "ds.ulysses_size = 2 .* {} .*ds.packing_samples = auto"),
    ],
)
def test_a_model_whose_rows_cannot_be_laid_so_is_named(
    config: Config, field: dict[str, Any], words: str, stated: str
) -> None:
    path = edit_config(Path(config.actor.model_name_or_path), **field)
    config.actor.num_gpus_per_node = config.critic.num_gpus_per_node = config.ref.num_gpus_per_node = 10
    config.rollout.batch_size = config.train.batch_size = config.sft.batch_size = 160
    check(config)
    expected = re.escape(stated.format(f"actor.model_name_or_path = {path}")).replace(re.escape(" .*"), ".*")
    for refuses in (check, partial(check_stage, stage="sft")):
        with pytest.raises(ConfigError, match=expected):
            refuses(change(config, words))


def test_sft_writes_into_a_new_directory(config: Config) -> None:
    Path(config.sft.output_dir).mkdir()
    check_stage(config, "sft")
    (Path(config.sft.output_dir) / "config.json").touch()
    with pytest.raises(ConfigError, match=r"sft\.output_dir: .* is there already and is not empty: remove it or name"):
        check_stage(config, "sft")


def test_sft_needs_its_own_keys_only(config: Config) -> None:
    config.data.prompt_dataset = config.reward.remote_url = ""
    check_stage(config, "sft")
    config.sft.dataset = config.sft.output_dir = ""
    with pytest.raises(ConfigError) as caught:
        check_stage(config, "sft")
    assert "sft.dataset is not set" in str(caught.value)
    assert "sft.output_dir is not set" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["train.gradient_checkpointing=selective", "ds.zero_stage=3"], "selective excludes ds.zero_stage = 3"),
        (["train.gradient_checkpointing=off", "actor.gradient_checkpointing_enable=true"], "contradict each other"),
        (["lora.alpha=32"], "has no effect with lora.rank = 0"),
        (["ds.compile=true", "ds.use_liger_kernel=true"], "ds.compile = true excludes ds.use_liger_kernel"),
        (["ds.attn_implementation=spda"], "ds.attn_implementation = 'spda' is not known"),
        (["ds.ulysses_size=2", "actor.num_gpus_per_node=2"], "ds.ulysses_size = 2 cuts rows in which sequences lie"),
    ],
)
def test_a_stage_has_the_rules_of_what_it_trains(config: Config, words: list[str], stated: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(stated)):
        check_stage(change(config, *words), "sft")


def test_a_place_that_cannot_be_written(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere, so the system's answer is replaced.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    for rules, key in ((check, "run_dir"), (partial(check_stage, stage="sft"), "sft.output_dir")):
        with pytest.raises(ConfigError, match=rf"{key}: you may not write to {tmp_path}: name another place"):
            rules(config)


def test_broken_rules_are_shown_where_python_keeps_no_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rollout]\ntop_p = 0.5\n")
    command = [sys.executable, "-OO", "-m", "slurm_rlhf.cli", "train", str(file), "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 2
    assert "rollout.top_p = 0.5 would make the engine sample from a part of the vocabulary" in done.stderr

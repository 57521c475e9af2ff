"""Model directories and names of models: what is refused, what comes from the cache, and what is no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lookalikes import llama_like
from random_models import ARCHITECTURES, REFUSED

from slurm_rlhf.cli import main as cli
from slurm_rlhf.config import architectures, user_data
from slurm_rlhf.config.architectures import CAUSAL
from slurm_rlhf.config.load import load_config, settled
from slurm_rlhf.config.model_directory import (
    check_architecture,
    check_length,
    check_model_directory,
    read_config,
    uncompared,
)
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.user_data import fetch_models
from slurm_rlhf.errors import ModelError


def directory(path: Path, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_the_table_holds_what_is_compared() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    names = {}
    for arch in ARCHITECTURES:
        names[AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(arch))].__name__] = arch
    refused = {name: arch for name, arch in names.items() if arch in REFUSED}
    assert {name: each.model_type for name, each in architectures.COMPARED.items()} | refused == names
    assert set(refused) <= set(architectures.REFUSED)


def test_an_architecture_that_was_not_compared_is_reported(tmp_path: Path) -> None:
    for names in (["Qwen2ForCausalLM"], ["Own", "Qwen2ForCausalLM"]):
        assert uncompared("actor", directory(tmp_path, architectures=names)) == ""
    stated = uncompared("actor", directory(tmp_path, architectures=["OtherForCausalLM"]))
    assert stated.startswith(f"actor: {tmp_path} is a OtherForCausalLM, which was never compared")
    assert "Qwen2ForCausalLM" in stated
    check_architecture("actor", str(tmp_path), sampled_len=64)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["PhiMoEForCausalLM"]}, "PhiMoEForCausalLM, which cannot be trained here: transformers"),
        ({"architectures": ["Cohere2ForCausalLM"], "sliding_window": 63}, "lower data.max_len = 64 to 63"),
        ({"model_type": "llama", "logit_scale": 0.5}, "logit_scale = 0.5.*how a llama does it is not known"),
        ({"model_type": "x", "text_config": {"model_type": "qwen2", "final_logit_softcapping": 30.0}}, "how a x does"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "final_logit_softcapping": 30.0}},
            "gemma3",
        ),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        check_architecture("actor", directory(tmp_path, **config), sampled_len=64)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "sliding_window": 64, "logit_scale": 0.25},
        {"model_type": "llama", "logit_scale": 1.0, "final_logit_softcapping": None},
        {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "final_logit_softcapping": 30.0}},
    ],
)
def test_what_is_right_is_not_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    check_architecture("actor", directory(tmp_path, **config), sampled_len=64)


WITHOUT_A_HEAD = [
    ({"architectures": ["PhiMoEForCausalLM"]}, "PhiMoEForCausalLM, which cannot be trained here"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "is a t5, which has an encoder and a decoder"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is a BertForMaskedLM, an encoder whose tokens see"),
    ({"model_type": "modernbert", "architectures": ["ModernBertForSequenceClassification"]}, "an encoder whose tokens"),
]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("config", "named"), WITHOUT_A_HEAD)
def test_what_is_no_decoder_is_refused_for_every_role(
    tmp_path: Path, config: dict[str, Any], named: str, head: bool
) -> None:
    with pytest.raises(ModelError, match=named):
        check_architecture("critic.model_name_or_path", directory(tmp_path, **config), head=head)


@pytest.mark.parametrize("name", ["Qwen2ForSequenceClassification", "LlamaModel", "LlamaForTokenClassification"])
def test_a_body_is_enough_for_values_and_scores_and_not_for_log_probs(tmp_path: Path, name: str) -> None:
    path = directory(tmp_path, architectures=[name], logit_scale=0.5)
    check_architecture("critic", path, head=False)
    with pytest.raises(ModelError, match=f"is a {name}, which is no causal language model.*Qwen2ForCausalLM"):
        check_architecture("actor", path)


def test_names_of_causal_classes_end_as_transformers_names_them() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert all(name.endswith(CAUSAL) for name in architectures.COMPARED)
    others = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if not name.endswith(CAUSAL)}
    assert others <= {"BertGenerationDecoder", "ReformerModelWithLMHead"}


def test_lengths_beyond_dynamic_and_nested_positions_are_refused(tmp_path: Path) -> None:
    stretched = {"rope_type": "linear", "factor": 4.0}
    check_length("actor", directory(tmp_path, max_position_embeddings=32, rope_parameters=stretched), 64)
    for config in (
        {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"text_config": {"max_position_embeddings": 32}},
    ):
        with pytest.raises(ModelError, match="to at most 32"):
            check_length("actor", directory(tmp_path, **config), 64)


# --- hub --------------------------------------------------------------------------------------------------------------


NAME = "Qwen/Qwen2.5-0.5B"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; nobody listens where the hub should be."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put_into(cache: Path, name: str) -> Path:
    """Write a model as `hf download` leaves it."""
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / "0a1b"
    snapshot.parent.mkdir(parents=True)
    llama_like(snapshot)
    # As the hub has it: no weight, and a config that names a known class.
    (snapshot / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (snapshot / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0a1b\n")
    return snapshot


def loaded(base: Path, name: str) -> str:
    (base / "run.toml").write_text(f"[actor]\nmodel_name_or_path = {json.dumps(name)}\n")
    return load_config(base / "run.toml").actor.model_name_or_path


def test_a_name_is_the_cached_model_and_a_directory_comes_first(cache: Path, tmp_path: Path) -> None:
    assert loaded(tmp_path, NAME) == NAME  # for `fetch_models`
    snapshot = put_into(cache, NAME)
    assert loaded(tmp_path, NAME) == str(snapshot)
    assert load_config(None, [f"--critic.model_name_or_path={NAME}"]).critic.model_name_or_path == str(snapshot)
    config = Config()
    config.actor.model_name_or_path = NAME
    assert settled(config).actor.model_name_or_path == str(snapshot)
    for path in ("models", "./a/b", "a/b/c", f"{tmp_path}/x", "~/x/y"):
        assert Path(loaded(tmp_path, path)).is_absolute()
    (tmp_path / "Qwen").mkdir()  # so the name is a path that is not there
    assert loaded(tmp_path, NAME) == str(tmp_path / NAME)


def test_half_a_download_is_none(cache: Path) -> None:
    snapshot = put_into(cache, NAME)
    (snapshot / "config.json").unlink()
    assert user_data.cached("Qwen--Qwen2.5-0.5B") is None


def test_without_a_network_one_sentence_says_how_to_get_the_model(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.actor.model_name_or_path = NAME
    said: list[str] = []
    with pytest.raises(ModelError, match=rf"^actor.model_name_or_path: {NAME}: .*`hf download {NAME}` on a login node"):
        fetch_models(config, said.append)
    assert said == [f"actor.model_name_or_path: {NAME} is not in the Hugging Face cache: downloading it"]
    with pytest.raises(ModelError, match=rf"the Hugging Face cache here has no model {NAME}: .*`hf download {NAME}`"):
        check_model_directory("actor.model_name_or_path", NAME, tokenizer=True)
    loaded(tmp_path, NAME)
    assert cli.main(["train", "run.toml"]) == 2
    captured = capsys.readouterr()
    assert "downloading it" in captured.out
    assert f"hf download {NAME}" in captured.err
    assert "Traceback" not in captured.err


def test_what_the_hub_gives_takes_the_place_of_the_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, repo_type: str, allow_patterns: list[str], etag_timeout: float) -> str:
        assert repo_type == "model"
        asked.append((name, allow_patterns))
        return str(put_into(cache, name))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = Config()
    config.actor.model_name_or_path, config.critic.model_name_or_path = NAME, "/a/directory"
    fetch_models(config, lambda text: None)
    assert asked == [(NAME, user_data.WANTED_FILES)]
    assert config.critic.model_name_or_path == "/a/directory"
    check_model_directory("actor.model_name_or_path", config.actor.model_name_or_path, tokenizer=True)


def test_what_is_no_model_is_called_by_its_name(tmp_path: Path) -> None:
    for name, stated in (
        ("adapter_config.json", "is a LoRA adapter"),
        ("model.gguf", "holds GGUF files"),
        ("x", "is not a"),
    ):
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).touch()
        with pytest.raises(ModelError, match=f"actor.model_name_or_path: {directory} {stated}"):
            read_config("actor.model_name_or_path", directory)
    for name, stated in (("model.gguf", "GGUF cannot be trained"), ("x", "name the directory that it is in")):
        file = tmp_path / name / name
        with pytest.raises(ModelError, match=f"{file} is a file, and a model is a directory: {stated}"):
            check_model_directory("actor.model_name_or_path", str(file), tokenizer=False)

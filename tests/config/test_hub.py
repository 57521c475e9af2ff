"""Models by their name: of the hub, from the cache, or one sentence that says how they get there; what is no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lookalikes import llama_like

from slurm_rlhf.cli import main as cli
from slurm_rlhf.config import hub
from slurm_rlhf.config.hub import fetch_models
from slurm_rlhf.config.load import load_config, settled
from slurm_rlhf.config.model_directory import check_model_directory, read_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError

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
    (model / "refs" / "main").write_text("0a1b")
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
    assert hub.cached("Qwen--Qwen2.5-0.5B") is None


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

    def download(name: str, allow_patterns: list[str], etag_timeout: float) -> str:
        asked.append((name, allow_patterns))
        return str(put_into(cache, name))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = Config()
    config.actor.model_name_or_path, config.critic.model_name_or_path = NAME, "/a/directory"
    fetch_models(config, lambda text: None)
    assert asked == [(NAME, hub.WANTED_FILES)]
    assert config.critic.model_name_or_path == "/a/directory"
    check_model_directory("actor.model_name_or_path", config.actor.model_name_or_path, tokenizer=True)


def test_what_is_no_model_is_called_by_its_name(tmp_path: Path) -> None:
    for name, told in (
        ("adapter_config.json", "is a LoRA adapter"),
        ("model.gguf", "holds GGUF files"),
        ("x", "is not a"),
    ):
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).touch()
        with pytest.raises(ModelError, match=f"actor.model_name_or_path: {directory} {told}"):
            read_config("actor.model_name_or_path", directory)
    for name, told in (("model.gguf", "GGUF cannot be trained"), ("x", "name the directory that it is in")):
        file = tmp_path / name / name
        with pytest.raises(ModelError, match=f"{file} is a file, and a model is a directory: {told}"):
            check_model_directory("actor.model_name_or_path", str(file), tokenizer=False)

"""Files of a model run no code: neither Python next to the weights, nor a pickle in their place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from packed_rows import edit_config
from tiny_models import make_tiny

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ModelError
from slurm_rlhf.trainer.models import load_policy

FP32 = Ds(param_dtype="fp32")
OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": "own.OwnTokenizer"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with code of its own, which leaves a file behind when it runs."""
    directory = tmp_path / "model"
    make_tiny(directory)
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit('ran')\n")
    edit_config(directory, auto_map=OWN)
    return directory


def test_code_with_the_weights_does_not_run(model: Path) -> None:
    assert load_policy(model, FP32, 4).model.config.model_type == "qwen2"
    assert Tokenizer.load(model).encode("x")
    assert not (model.parent / "ran").exists()


def test_a_model_that_needs_its_own_code_is_refused(model: Path) -> None:
    edit_config(model, model_type="own")
    with pytest.raises(ModelError, match=r"cannot load it as AutoModelForCausalLM: .*(trust_remote_code|custom code)"):
        load_policy(model, FP32, 4)
    assert not (model.parent / "ran").exists()


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return open, (str(self.path), "w")


def test_a_pickle_in_place_of_weights_does_not_run(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Runs(model.parent / "ran")}, model / "pytorch_model.bin")
    with pytest.raises(ModelError, match="hold more than tensors"):
        load_policy(model, FP32, 4)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(model.parent / "ran"), protocol=2))
    with pytest.raises(ModelError):
        load_policy(model, FP32, 4)
    assert not (model.parent / "ran").exists()
    assert json.loads((model / "config.json").read_text())["auto_map"] == OWN

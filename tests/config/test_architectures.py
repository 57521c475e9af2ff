"""The table of compared architectures is the comparison's own list, and says what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from random_models import ARCHITECTURES, REFUSED

from slurm_rlhf.config import architectures
from slurm_rlhf.config.architectures import CAUSAL
from slurm_rlhf.config.model_directory import check_architecture, check_length, uncompared
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


def test_an_architecture_that_was_not_compared_is_told(tmp_path: Path) -> None:
    assert uncompared("actor", directory(tmp_path, architectures=["Qwen2ForCausalLM"])) == ""
    told = uncompared("actor", directory(tmp_path, architectures=["OtherForCausalLM"]))
    assert told.startswith(f"actor: {tmp_path} is a OtherForCausalLM, which was never compared")
    assert "Qwen2ForCausalLM" in told
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

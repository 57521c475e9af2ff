"""A model's shape and FLOPs from config.json alone, against the modules that transformers builds from it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import VARIANTS, make_config
from transformers import AutoModelForCausalLM

from slurm_rlhf.errors import ModelError
from slurm_rlhf.placement.model_shape import FAMILIES, ModelShape, batch_flops, forward_flops, mfu, read_shape, shape_of


def shape_from(config: Any, directory: Path) -> ModelShape:
    config.save_pretrained(directory)
    return read_shape("actor.model_name_or_path", directory)


def test_every_family_has_a_variant() -> None:
    assert {variant.split()[0] for variant in VARIANTS} == set(FAMILIES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_are_those_of_the_module(variant: str, tmp_path: Path) -> None:
    config = make_config(variant)
    shape = shape_from(config, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fused = variant.startswith("phi3")  # q, k and v, and gate and up, are one tensor each
    if not fused:
        theirs = Counter(parameter.numel() for parameter in model.parameters())
        ours: Counter[int] = Counter()
        for tensor in shape.tensors:
            ours[tensor.elements] += tensor.count
        assert ours == theirs
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.body == sum(parameter.numel() for parameter in model.base_model.parameters())
    assert shape.head == model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_of_the_matrix_products(variant: str, tmp_path: Path) -> None:
    """torch counts eager attention over all keys; the formula has the causal half, and experts as the router sends."""
    from torch.utils.flop_counter import FlopCounterMode

    config = make_config(variant, attn_implementation="eager", experts_implementation="eager", use_cache=False)
    shape, tokens = shape_from(config, tmp_path), 8
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(2, 90, (1, tokens))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids).logits
    forward = counter.get_total_flops()
    masked = 4 * shape.layers * shape.heads * shape.head_dim * (tokens - (tokens + 1) / 2) * tokens
    # transformers makes the rotary angles by a matrix product, per kind of layer.
    angles = len(set(getattr(config, "layer_types", None) or [""])) * shape.head_dim * tokens
    assert forward == pytest.approx(batch_flops(shape, [tokens], backward=False) + masked + angles, abs=angles)
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    both = forward + counter.get_total_flops()
    assert both == pytest.approx(batch_flops(shape, [tokens], backward=True) + 3 * masked, rel=0.01)


def test_a_batch_is_the_sum_of_its_tokens(tmp_path: Path) -> None:
    shape = shape_from(make_config("qwen2"), tmp_path)
    whole = 3 * (5 * forward_flops(shape, 5) + 9 * forward_flops(shape, 9))
    assert batch_flops(shape, [5, 9], backward=True) == pytest.approx(whole)
    without = 5 * forward_flops(shape, 5, 0.0) + 9 * forward_flops(shape, 9, 0.0)
    assert batch_flops(shape, [5, 9], backward=False, head_tokens=0) == pytest.approx(without)
    assert batch_flops(shape, [], backward=True) == 0
    assert mfu(flops=989.4e12, seconds=2.0, gpus=4, peak_tflops=989.4) == pytest.approx(1 / 8)
    assert mfu(1.0, 1.0, 1, 0.0) == 0.0


def test_windows_bound_what_attention_costs(tmp_path: Path) -> None:
    shape = shape_from(make_config("mistral"), tmp_path)
    assert shape.windows == (8, 8, 8)
    open_shape = shape_from(make_config("llama"), tmp_path)
    assert forward_flops(shape, 8) == forward_flops(open_shape, 8)
    seen = [min(token + 1, 8) for token in range(20)]
    per_key = 4 * shape.layers * shape.heads * shape.head_dim
    difference = forward_flops(open_shape, 20) - forward_flops(shape, 20)
    assert difference == pytest.approx(per_key * (21 / 2 - sum(seen) / 20))
    assert shape_of({**make_config("qwen2").to_dict(), "use_sliding_window": False}).windows == (0, 0, 0)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        # Published: "7.61B" and "6.53B non-embedding"; "32.8B" and "31.0B".
        ({"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
          "num_key_value_heads": 4, "vocab_size": 152064}, (7.61, 6.53)),
        ({"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
          "num_key_value_heads": 8, "vocab_size": 152064}, (32.8, 31.2)),
    ],
    ids=["7B", "32B"],
)  # fmt: skip
def test_published_counts(field: dict[str, int], expected: tuple[float, float]) -> None:
    shape = shape_of({"model_type": "qwen2", "tie_word_embeddings": False, **field})
    assert shape.parameters / 1e9 == pytest.approx(expected[0], abs=0.05)
    assert (shape.parameters - shape.of_kind("embedding", "head")) / 1e9 == pytest.approx(expected[1], abs=0.05)
    # 6 N is the rule of thumb for short sequences.
    assert 3 * forward_flops(shape, 1) == pytest.approx(6 * (shape.parameters - shape.of_kind("embedding")), rel=0.01)


def test_experts_count_by_visit() -> None:
    """Published for Qwen3-30B-A3B: 30.5B in total, 3.3B active."""
    shape = shape_of(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        }
    )
    assert shape.parameters / 1e9 == pytest.approx(30.5, abs=0.05)
    assert shape.active / 1e9 == pytest.approx(3.3, abs=0.06)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "holds no config.json"),
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ({"model_type": "alien"}, "model_type 'alien' has no known memory model; known: qwen2, "),
        ({"model_type": "qwen2", "hidden_size": 64}, "does not say num_hidden_layers"),
        ({"model_type": "qwen2", "quantization_config": {"quant_method": "gptq"}}, "holds quantised weights .*gptq"),
    ],
)
def test_what_cannot_be_read_is_one_line(config: Any, said: str, tmp_path: Path) -> None:
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=said) as caught:
        read_shape("actor.model_name_or_path", tmp_path)
    assert "\n" not in str(caught.value)

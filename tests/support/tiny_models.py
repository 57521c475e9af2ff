"""Tiny Hugging Face model directories for tests: real architectures, random weights, a character-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from random_models import SIZES, write_model


def make_tiny(
    path: str | Path,
    arch: str = "qwen2",
    tied: bool = True,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    seed: int = 0,
    dtype: str = "fp32",
) -> Path:
    """Write a model directory (config, weights, tokenizer, generation_config) of `arch` qwen2, qwen3 or llama.

    hidden / heads must be at least 32: vLLM's attention on CPUs knows no smaller heads.
    """
    import torch

    sizes = {
        **SIZES,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "tie_word_embeddings": tied,
    }
    width = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    write_model(Path(path), arch, sizes, seed, lambda model: model.to(width))
    return Path(path)


def mislabel(path: Path) -> Path:
    """Call a byte-level tokenizer Llama's, as published models do: transformers makes another one of it."""
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    return path


def make_reward(path: str | Path, head: str = "score", arch: str = "qwen2", *, seed: int = 1, **sizes: Any) -> Path:
    """Write a reward model of `arch` whose head is spelled `score`, `value_head` or `v_head.summary` (with a bias).

    `score` is what transformers saves as AutoModelForSequenceClassification with one label.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    path = make_tiny(path, arch, tied=True, seed=seed, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
        torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(path)
    if head != "score":
        weights = load_file(path / "model.safetensors")
        weights[f"{head}.weight"] = weights.pop("score.weight")
        if head == "v_head.summary":
            weights[f"{head}.bias"] = torch.tensor([0.25])
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path

"""Trainer and transformers, without an engine: what the models do with their logits, by a head in bf16 and in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from packed_rows import make_experience
from random_models import make_model

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ModelError
from slurm_rlhf.parity import sides
from slurm_rlhf.parity.verdicts import NEW_TOKENS, PRECISIONS, prompts
from slurm_rlhf.trainer import logprobs

EXPERIENCE = make_experience([(3, 9), (12, 1), (1, 30), (5, 44)])
MAX_LEN = 64
WITH_HEAD_MATH = ("gemma2", "granite", "cohere")  # a soft cap, a divisor, a factor


def apart(path: Path, precision: str) -> float:
    config = sides.settings(str(path), PRECISIONS[precision], MAX_LEN)
    one, other = sides.trained(config, EXPERIENCE), sides.plain(config, EXPERIENCE)
    assert one.shape == other.shape == EXPERIENCE.action_mask.shape
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("arch", WITH_HEAD_MATH)
def test_a_formula_behind_the_head_is_applied_and_would_be_missed(
    tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "model", arch)
    assert apart(path, "fp32") < 1e-5
    monkeypatch.setattr("slurm_rlhf.trainer.models.head_math", lambda config, where: logprobs.PLAIN_HEAD)
    with pytest.raises(ModelError, match="are not those of its body and its output embeddings"):
        apart(path, "fp32")


@pytest.mark.parametrize("arch", WITH_HEAD_MATH)
def test_a_head_in_fp32_is_the_same_multiplication_in_both(tmp_path: Path, arch: str) -> None:
    """The bodies are in bf16; where their attention computes alike, the rest is fp32."""
    path = make_model(tmp_path / "model", arch)
    config = sides.settings(str(path), PRECISIONS["bf16+head"], MAX_LEN)
    config.ds.attn_implementation = "eager"
    wide, plain = sides.trained(config, EXPERIENCE), sides.plain(config, EXPERIENCE)
    narrow = sides.trained(sides.settings(str(path), PRECISIONS["bf16"], MAX_LEN), EXPERIENCE)
    assert np.abs(wide - plain).max() < 0.05
    assert np.abs(wide - plain).mean() < 0.8 * np.abs(narrow - plain).mean()


def test_prompts_are_of_all_lengths_and_leave_room_for_a_response(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(make_model(tmp_path / "model", "qwen2")))
    for max_len in (48, 320, 3000):
        lengths = [len(ids) for ids in prompts(tokenizer, max_len)]
        assert lengths[0] == 1
        assert max_len // 2 < lengths[-1] + NEW_TOKENS <= max_len
    assert len(lengths) == 6


def test_a_tokenizer_that_knows_no_letters_is_told(tmp_path: Path) -> None:
    class Mute(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0]

    with pytest.raises(ModelError, match="its tokenizer makes 1 tokens of an English text"):
        prompts(Mute.__new__(Mute), 64)


def test_a_head_that_is_no_linear_layer_has_no_fp32_form() -> None:
    class Model:
        def get_output_embeddings(self) -> torch.nn.Module:
            return torch.nn.Identity()

    with pytest.raises(ModelError, match="x: its head is a Identity"):
        sides._widen_head(Model(), "x")

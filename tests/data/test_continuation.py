"""Answers to train on are the tokens that a generating model would put behind the prompt's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lookalikes import llama_like, sentencepiece_like

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.trainer.sft import load_examples


def example(directory: Path, prompt: str, answer: str) -> tuple[list[str], list[str], str]:
    """(tokens of the prompt, tokens of the response, text of both) as they are trained on."""
    tokenizer = Tokenizer.load(directory)
    file = directory / "rows.jsonl"
    file.write_text(json.dumps({"input": prompt, "output": answer}) + "\n")
    found = load_examples(file, tokenizer, Data(max_len=100)).experience
    ids, length = found.token_ids.tolist(), int(found.prompt_lens[0])
    assert ids[:length] == tokenizer.encode(prompt)  # generation begins behind these
    names = [tokenizer.backend.id_to_token(token) for token in ids]
    return names[:length], names[length:], tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("pieces", "prompt", "answer", "expected"),
    [
        ((), "2+2=", "4", ["4"]),
        (("▁4",), "2+2=", "4", ["4"]),  # what the answer alone would be
        (("▁4",), "2+2= ", "4", ["4"]),  # prompt and answer together end in it: no token of the prompt's
        (("▁4",), "2+2=", " 4", ["▁4"]),
        (("=4", "=42"), "2+2=", "42", ["4", "2"]),  # one token holds the seam
        ((), "2+2=", "ü", ["<0xC3>", "<0xBC>"]),
        ((), "2+2=", "", []),
    ],
)
def test_sentencepiece(tmp_path: Path, pieces: tuple[str, ...], prompt: str, answer: str, expected: list[str]) -> None:
    _, response, text = example(sentencepiece_like(tmp_path, pieces), prompt, answer)
    assert response == [*expected, "</s>"]
    assert text == prompt + answer


@pytest.mark.parametrize(
    ("merges", "prompt", "answer", "expected"),
    [
        ((), "2+2=", "4", ["4"]),
        ((("=", "4"),), "2+2=", "4", ["4"]),
        ((("=", "4"), ("4", "2")), "2+2=", "42", ["42"]),
        ((("Ġ", "4"),), "2+2= ", "42", ["4", "2"]),
        ((("Ġ", "4"),), "2+2=", " 42", ["Ġ4", "2"]),
    ],
)
def test_byte_level_bpe(
    tmp_path: Path, merges: tuple[tuple[str, str], ...], prompt: str, answer: str, expected: list[str]
) -> None:
    _, response, text = example(llama_like(tmp_path, merges), prompt, answer)
    assert response == [*expected, "<|end_of_text|>"]
    assert text == prompt + answer


def test_templated_text_is_trained_with_one_beginning(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_like(tmp_path))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"input": "<s>[INST] 2+2 [/INST]", "output": "4"}) + "\n")
    found = load_examples(file, tokenizer, Data(max_len=100)).experience
    assert found.token_ids.tolist().count(tokenizer.bos_token_id or -1) == 1
    assert found.response_lens.tolist() == [2]

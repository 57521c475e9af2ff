"""Tokens around prompts: never two at the beginning; a chat template whose answers no engine ends is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lookalikes import llama_like, sentencepiece_like

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer, has_double_bos, missing_eos

FAMILIES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "llama": (llama_like, "<|begin_of_text|>"),
    "sentencepiece": (sentencepiece_like, "<s>"),
}
ANSWERS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prompt_ids(directory: Path, text: str) -> tuple[Tokenizer, list[int]]:
    tokenizer = Tokenizer.load(directory)
    file = directory / "rows.jsonl"
    file.write_text(json.dumps({"input": text}) + "\n")
    return tokenizer, PromptSet.load(file, tokenizer, Data(), 200)[0].token_ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("body", ["[INST] 1+1 [/INST]", "[INST] a [/INST] b{eos}{bos}[INST] c [/INST]"])
def test_text_that_was_templated_beforehand_begins_once(tmp_path: Path, family: str, body: str) -> None:
    make, bos = FAMILIES[family]
    text = bos + body.format(bos=bos, eos="")
    tokenizer, ids = prompt_ids(make(tmp_path), text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id or -1) == text.count(bos)
    assert ids[0] == tokenizer.bos_token_id
    assert not has_double_bos(ids, tokenizer)
    assert has_double_bos(tokenizer.encode(text), tokenizer)  # what transformers' tokenizer(text) makes of it


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_keeps_the_token_that_the_tokenizer_adds(tmp_path: Path, family: str) -> None:
    make, bos = FAMILIES[family]
    for text in ("1+1=", f"what is {bos} ?"):
        tokenizer, ids = prompt_ids(make(tmp_path), text)
        assert ids == tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id


def test_blanks_before_it_make_no_difference(tmp_path: Path) -> None:
    tokenizer, ids = prompt_ids(sentencepiece_like(tmp_path), " <s>[INST]")
    assert ids.count(tokenizer.bos_token_id or -1) == 1


@pytest.mark.parametrize(
    ("end", "listed", "told"),
    [
        ("<|end_of_text|>", None, ""),
        ("<|eot_id|>\n", None, "ends an answer by '<|eot_id|>'"),
        ("<|eot_id|>\n", "<|eot_id|>", ""),
        ("", None, "ends an answer by nothing"),
        ("\n", "<|eot_id|>", "engines end a response at <|end_of_text|> or <|eot_id|> only"),
    ],
)
def test_a_template_whose_answers_do_not_end_is_told(tmp_path: Path, end: str, listed: str | None, told: str) -> None:
    tokenizer = Tokenizer.load(llama_like(tmp_path, template=ANSWERS.replace("END", end)))
    if listed:
        ends = [tokenizer.eos_token_id, tokenizer.encode(listed, add_special_tokens=False)[0]]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    said = missing_eos(tokenizer)
    assert told in said
    assert bool(told) == bool(said)
    assert "generation_config.json" in said or not told


def test_without_a_template_there_is_nothing_to_tell(tmp_path: Path) -> None:
    """The same model would be told of one whose answers do not end."""
    assert missing_eos(Tokenizer.load(llama_like(tmp_path))) == ""
    assert missing_eos(Tokenizer.load(llama_like(tmp_path, template=ANSWERS.replace("END", "")))) != ""

"""Demonstrations and preferences in the shapes that people have give the tokens and masks of plain messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import TEMPLATES, write_tokenizer

from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.data.rows import read_rows
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.stages.examples import Examples, RefusedRows, fingerprint, load_examples, load_pairs
from slurm_rlhf.stages.view import views

USER, ANSWER = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "12"}
CALL: dict[str, Any] = {
    **{"role": "assistant", "content": None},
    "tool_calls": [{"function": {"name": "look_up", "arguments": {"n": 12}}}],
}
TOOLS = [{"function": {"name": "look_up", "parameters": {"n": {"type": "integer"}}}}]
TALK = {"messages": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER], "tools": TOOLS}
OTHER = {
    "messages": [USER, {**ANSWER, "name": "b"}],
    "tools": [{"function": {"name": "f", "parameters": {"m": {"type": "x"}}}}],
}
"""Has keys that TALK has not, which a table in Parquet gives to both."""


def parted(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": text} for text in message["content"]]}


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return write_tokenizer(tmp_path / "model", TEMPLATES["hermes"])


def read(tmp_path: Path, load: Callable[..., Examples], file: str, text: str, tokenizer: Tokenizer) -> Examples:
    (tmp_path / file).write_text(text)
    data = Data(apply_chat_template=True, output_key="messages", tools_key="tools", input_key="prompt")
    return load(tmp_path / file, tokenizer, data)


SHAREGPT = {"messages": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "12"}]}
ALIKE = [
    ("rows.jsonl", lines(SHAREGPT)),
    ("rows.json", json.dumps([SHAREGPT], indent=1)),
    ("rows.json", lines(SHAREGPT)),
    ("rows.jsonl", lines({"messages": [parted(USER), parted(ANSWER)]})),
    ("rows.jsonl", lines({"messages": [USER, {**ANSWER, "tool_calls": None}]})),
]


@pytest.mark.parametrize(("file", "text"), ALIKE)
def test_conversations(tmp_path: Path, tokenizer: Tokenizer, file: str, text: str) -> None:
    plain = read(tmp_path, load_examples, "plain.jsonl", lines({"messages": [USER, ANSWER]}), tokenizer)
    assert fingerprint(read(tmp_path, load_examples, file, text, tokenizer)) == fingerprint(plain)


def test_parquet_has_no_keys_of_other_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = read(tmp_path, load_examples, "plain.jsonl", lines(TALK, OTHER), tokenizer)
    pq.write_table(pa.Table.from_pylist([TALK, OTHER]), tmp_path / "rows.parquet")
    data = Data(apply_chat_template=True, output_key="messages", tools_key="tools")
    assert fingerprint(load_examples(tmp_path / "rows.parquet", tokenizer, data)) == fingerprint(plain)


def test_dialogues_as_text_are_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    talk = [USER, ANSWER, {"role": "user", "content": "c"}]
    whole = "\n\nHuman: a b\n\nAssistant: 12\n\nHuman: c\n\nAssistant:"
    as_text = lines({"chosen": f"{whole} 3", "rejected": f"{whole} 4"})
    answers = {key: [*talk, {**ANSWER, "content": text}] for key, text in (("chosen", "3"), ("rejected", "4"))}
    plain = read(tmp_path, load_pairs, "plain.jsonl", lines(answers), tokenizer)
    assert fingerprint(read(tmp_path, load_pairs, "hh.jsonl", as_text, tokenizer)) == fingerprint(plain)


def test_what_only_resembles_messages_or_a_dialogue_stays(tmp_path: Path, tokenizer: Tokenizer) -> None:
    edges = [{"from": 1, "to": 2, "by": None}]
    (tmp_path / "graph.jsonl").write_text(lines({"label": edges}))
    assert [row for _, row in read_rows(tmp_path / "graph.jsonl")] == [{"label": edges}]
    talk = "Once.\n\nHuman: a b\n\nAssistant: "
    with pytest.raises(RefusedRows, match="no messages before the answers"):
        read(tmp_path, load_pairs, "a.jsonl", lines({"chosen": f"{talk}1", "rejected": f"{talk}2"}), tokenizer)


@pytest.mark.parametrize("content", ["", None])
def test_a_call_of_a_tool_is_no_answer_of_a_pair(tmp_path: Path, tokenizer: Tokenizer, content: str | None) -> None:
    """Its words alone would be nothing: the pair would train the end of a turn."""
    row = {"prompt": [USER], "chosen": [{**CALL, "content": content}], "rejected": [ANSWER]}
    with pytest.raises(RefusedRows, match=r"'chosen' must be .* the assistant's words, which calls of tools are not"):
        read(tmp_path, load_pairs, "rows.jsonl", lines(row), tokenizer)


def test_files_may_differ_in_columns_of_other_stages_and_unread_ones_are_named(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.jsonl").write_text(lines({"instruction": "add", "input": "1 2", "output": "3"}))
    (tmp_path / "b.jsonl").write_text(lines({"input": "1", "output": "3", "chosen": "1", "label": "2"}))
    config = Config()
    config.actor.model_name_or_path = str(tokenizer.directory)
    config.sft.dataset = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    (view,) = views(config, 0)
    assert len(view.lengths) == 2
    assert "columns that are not read: instruction" in view.facts

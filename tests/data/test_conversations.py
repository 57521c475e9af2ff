"""Conversations as examples: which tokens are the assistant's, by marks as in transformers, and without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES, write_tokenizer
from transformers import AutoTokenizer

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.examples import load_examples

PLAIN = TEMPLATES["hermes"]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be <think>\nthoughtful"},
    {"role": "user", "content": "look it up: a b"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look_up", "arguments": {"n": 12}}}]},
    {"role": "tool", "content": "there are 1234567 things"},
    {"role": "assistant", "content": "1234567 — ü"},
    {"role": "user", "content": "assistant false?"},
    {"role": "assistant", "content": " 8.50 of them"},
    {"role": "user", "content": "no more"},
]


def marked(source: str) -> str:
    """The template with `{% generation %}` marks around what the assistant says, up to its end token."""
    head, role, rest = source.partition("<|{{ m.role }}|>")
    closed = "{% endif %}{% endfor %}{% if add_generation_prompt"
    body, _, tail = rest.rpartition(closed)
    inner = "{% endif %}" if body.startswith("{% if m.tool_calls") else ""
    words = f"{body.removesuffix(chr(10))}{inner}"
    line = "{{ '\\n' }}" if body.endswith("\n") else ""
    spoken = f"{{% generation %}}{words}{{% endgeneration %}}"
    chosen = f"{{% if m.role == 'assistant' %}}{spoken}{{% else %}}{words}{{% endif %}}{line}"
    return f"{head}{role}{chosen}{closed.removeprefix(inner)}{tail}"


def sft(directory: Path, tokenizer: Tokenizer, *rows: dict[str, Any], **data: Any) -> Experience:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"max_len": 999, "apply_chat_template": True, "output_key": "messages", **data}
    return load_examples(file, tokenizer, Data(**keys)).experience


def stated(found: Experience) -> tuple[list[int], list[bool]]:
    """The tokens of one example, and which are in the loss."""
    return found.token_ids.tolist(), [False] * int(found.prompt_lens[0]) + found.action_mask.tolist()


def in_loss(found: Experience, tokenizer: Tokenizer) -> str:
    ids, mask = stated(found)
    chosen = [token if wanted else None for token, wanted in zip(ids, mask, strict=True)]
    words = "".join("#" if token is None else tokenizer.decode([token], skip_special_tokens=False) for token in chosen)
    return "#".join(filter(None, words.split("#")))


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers_and_of_prefixes(tmp_path: Path, name: str) -> None:
    talk = json.loads(json.dumps(TALK))
    if name == "deepseek":
        talk[2]["tool_calls"][0]["function"]["arguments"] = '{"n": 12}'
    by_marks = sft(tmp_path, write_tokenizer(tmp_path / "marks", marked(TEMPLATES[name])), {"messages": talk})
    by_prefix = sft(tmp_path, write_tokenizer(tmp_path / "plain", TEMPLATES[name]), {"messages": talk})
    theirs = AutoTokenizer.from_pretrained(tmp_path / "marks").apply_chat_template(
        talk, return_assistant_tokens_mask=True, return_dict=True
    )
    ids, mask = stated(by_marks)
    assert (theirs["input_ids"][: len(ids)], theirs["assistant_masks"][: len(ids)]) == (ids, mask)
    assert not any(theirs["assistant_masks"][len(ids) :])
    assert stated(by_prefix) == (ids, mask)


def test_an_answer_is_the_same_as_text_and_as_messages(tmp_path: Path) -> None:
    # The tokenizer's own end-of-sequence token is another than that of the template, as in Qwen's base models.
    tokenizer = write_tokenizer(tmp_path / "model", PLAIN)
    tokenizer.eos_token_id = tokenizer.backend.token_to_id("<pad>")
    (tmp_path / "model/generation_config.json").unlink()
    asked, said = TALK[1], {"role": "assistant", "content": "8.50"}
    rows: list[dict[str, Any]] = [
        {"input": asked["content"], "messages": "8.50"},
        {"input": [asked], "messages": "8.50<|end|>"},
        {"input": [asked], "messages": [said]},
        {"messages": [asked, said]},
        {"input": "a b", "messages": [asked, said]},
        {"input": [asked, said]},
    ]
    found = [stated(sft(tmp_path, tokenizer, row)) for row in rows]
    assert found == [found[0]] * len(rows)
    text = tokenizer.decode(found[0][0], skip_special_tokens=False)
    assert text == "<|user|>look it up: a b<|end|>\n<|assistant|>8.50<|end|>"
    plain = sft(tmp_path, tokenizer, {"input": "1", "messages": "2<pad>"}, apply_chat_template=False)
    assert tokenizer.decode(plain.token_ids.tolist(), skip_special_tokens=False) == "12<pad>"


def test_only_what_stands_behind_the_prompt_is_trained_on(tmp_path: Path) -> None:
    row = {"input": TALK[1:5], "messages": [TALK[6], TALK[1], {"role": "assistant", "content": "7"}]}
    for name, template in (("plain", PLAIN), ("marks", marked(PLAIN))):
        tokenizer = write_tokenizer(tmp_path / name, template)
        assert in_loss(sft(tmp_path, tokenizer, row), tokenizer) == " 8.50 of them<|end|>#7<|end|>"
        with pytest.raises(DataError, match=r"rows\.jsonl:1: no words of the assistant are to be trained on"):
            sft(tmp_path, tokenizer, {"messages": TALK[5:6]})


def test_a_template_that_changes_earlier_turns_needs_marks(tmp_path: Path) -> None:
    strips = PLAIN.replace("{{ m.content or '' }}", "{{ (m.content or '') if loop.last else '...' }}")
    tokenizer = write_tokenizer(tmp_path / "plain", strips)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template of .* message 3 .* put \{% generation %\}"):
        sft(tmp_path, tokenizer, {"messages": TALK})
    tokenizer = write_tokenizer(tmp_path / "marks", marked(strips))
    last = {"role": "assistant", "content": "8.50"}
    assert in_loss(sft(tmp_path, tokenizer, {"messages": [*TALK[3:6], last]}), tokenizer) == "...<|end|>#8.50<|end|>"


def test_a_template_without_an_end_gets_that_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(
        tmp_path / "model", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    texts = [
        tokenizer.decode(sft(tmp_path, tokenizer, row).token_ids.tolist(), skip_special_tokens=False)
        for row in ({"messages": TALK[5:7]}, {"input": TALK[5]["content"], "messages": "assistant:  8.50 of them"})
    ]
    assert texts == ["user: assistant false?\nassistant:  8.50 of them<|end|>"] * 2


def test_tools_of_a_row_are_shown_to_the_model(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", PLAIN)
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    rows: list[dict[str, Any]] = [{"messages": TALK[5:7]}, {"input": "1", "messages": "2"}]
    for row in rows:
        with_tools = sft(tmp_path, tokenizer, row | {"tools": tools}, tools_key="tools")
        shown = tokenizer.decode(with_tools.token_ids.tolist(), skip_special_tokens=False)
        assert shown.startswith(f"<|system|>{json.dumps(tools[0])}<|end|>")
        assert stated(sft(tmp_path, tokenizer, row | {"tools": tools})) == stated(sft(tmp_path, tokenizer, row))
        assert stated(sft(tmp_path, tokenizer, row, tools_key="tools")) == stated(sft(tmp_path, tokenizer, row))
        with pytest.raises(DataError, match=r"rows\.jsonl:1: 'tools' \(data\.tools_key\) must be a list of schemas"):
            sft(tmp_path, tokenizer, row | {"tools": "look_up"}, tools_key="tools")

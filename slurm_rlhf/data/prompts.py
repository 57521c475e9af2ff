"""Load the prompts of a data set, and tokenize them once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.rows import Row, cell, read_rows
from slurm_rlhf.data.tokenizer import Tokenizer, encode_prompts
from slurm_rlhf.errors import DataError, ModelError, cut
from slurm_rlhf.records import Prompt

CHUNK = 4096  # rows tokenized at a time


@dataclass(slots=True)
class PromptSet:
    """Hold the prompts that fit, in file order. `prompts[i].index` is the row of the file, which need not be i."""

    prompts: list[Prompt]
    dropped: int  # prompts longer than the limit
    answered: int = 0  # prompts that end with a message of the assistant
    path: Path = Path()

    @classmethod
    def load(
        cls, path: Path | str, tokenizer: Tokenizer, data: Data, max_prompt_tokens: int, max_samples: int = 0
    ) -> PromptSet:
        """Read the first `max_samples` rows (0: all) of a data set, as `read_rows`.

        The text is the column `data.input_key`, put into `data.input_template`. With `data.apply_chat_template` it is
        the message of a user, or the column holds a list of messages. `encode_prompts` tokenizes it. Prompts of more
        than `max_prompt_tokens` tokens are dropped and counted.
        Raises DataError with file and line for a row without a usable prompt, and when no prompt is left; ModelError
        when a chat template is needed and the model has none.
        """
        return cls.of(read_rows(Path(path), max_samples, data), Path(path), tokenizer, data, max_prompt_tokens)

    @classmethod
    def of(
        cls, rows: Iterable[tuple[str, Row]], path: Path, tokenizer: Tokenizer, data: Data, max_prompt_tokens: int
    ) -> PromptSet:
        """Make the prompts of `rows`, (position for errors, row), as `load` does. `path`: their source, for errors."""
        kept: list[Prompt] = []
        dropped = 0
        numbered = ((index, *row) for index, row in enumerate(rows))
        for found in prompts_of(numbered, tokenizer, data, max_prompt_tokens):
            if isinstance(found, Prompt):
                kept.append(found)
            elif found.long:
                dropped += 1
            else:
                raise found.error
        if dropped and not kept:
            raise DataError(
                f"{path}: all {dropped} prompts are longer than {max_prompt_tokens} tokens (data.max_len - "
                "rollout.max_new_tokens): raise data.max_len or lower rollout.max_new_tokens"
            )
        if not kept:
            raise DataError(f"{path}: the file holds no prompts")
        chats = [value for prompt in kept if _is_chat(value := prompt.row[data.input_key])]
        return cls(kept, dropped, sum(chat[-1]["role"] == "assistant" for chat in chats), path)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def fingerprint(self) -> str:
        """Return a hash of the rows, tokens and labels; a checkpoint stores it to detect other data."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            digest.update(np.asarray([prompt.index, len(prompt.token_ids)], dtype=np.int64).tobytes())
            digest.update(prompt.token_ids.tobytes())
            digest.update(json.dumps(prompt.label, sort_keys=True, default=str).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class BadRow:
    """Says why a row has no prompt."""

    index: int
    error: DataError | ModelError
    text: str | None = None
    long: bool = False  # True: it has more tokens than a prompt may have


def prompts_of(
    rows: Iterable[tuple[int, str, Row]], tokenizer: Tokenizer, data: Data, max_tokens: int
) -> Iterator[Prompt | BadRow]:
    """Make prompts of at most `max_tokens` tokens from rows: (number, position for errors, row).

    Prompts come in the order of the rows. A bad row without a text comes before the prompts of its chunk.
    """
    texts: list[tuple[int, str, Row, str]] = []
    for index, where, row in rows:
        try:
            texts.append((index, where, row, prompt_text(row, where, tokenizer, data)))
        except (DataError, ModelError) as error:
            yield BadRow(index, error)
        if len(texts) == CHUNK:
            yield from _encoded(texts, tokenizer, data, max_tokens)
            texts = []
    yield from _encoded(texts, tokenizer, data, max_tokens)


def _encoded(
    texts: list[tuple[int, str, Row, str]], tokenizer: Tokenizer, data: Data, max_tokens: int
) -> Iterator[Prompt | BadRow]:
    encoded = encode_prompts([text for *_, text in texts], tokenizer, data.apply_chat_template)
    for (index, where, row, text), ids in zip(texts, encoded, strict=True):
        if not ids:
            yield BadRow(index, DataError(f"{where}: {_no_token(text, tokenizer, data)}"), text)
        elif len(ids) > max_tokens:
            long = (
                f"{where}: the prompt is longer than {max_tokens} tokens, and with rollout.max_new_tokens it does not "
                f"fit into data.max_len = {data.max_len}"
            )
            yield BadRow(index, DataError(long), text, long=True)
        else:
            assert isinstance(row, dict)
            label = row.get(data.label_key)
            yield Prompt(index, text, np.asarray(ids, dtype=np.int32), label, row, data.input_key)


def prompt_text(row: Row, where: str, tokenizer: Tokenizer, data: Data) -> str:
    """Return the text of a prompt as it is tokenized. Raises DataError, its message starting with `where`."""
    value = cell(row, data.input_key, "data.input_key", where)
    if data.apply_chat_template and _is_chat(value):
        return tokenizer.chat(value, where, tools=prompt_tools(row, where, data))
    if not isinstance(value, str):
        needed = "a string or a list of messages with role and content" if data.apply_chat_template else "a string"
        remedy = ": messages need data.apply_chat_template = true" if _is_chat(value) else ""
        raise DataError(f"{where}: {data.input_key!r} must be {needed}, got {type(value).__name__}{remedy}")
    assert isinstance(row, dict)  # `cell` raises what is wrong with it
    (message,) = prompt_messages(row, data)
    if not data.apply_chat_template:
        return str(message["content"])
    return tokenizer.chat([message], where, tools=prompt_tools(row, where, data))


def prompt_tools(row: Row, where: str, data: Data) -> list[dict[str, Any]]:
    """Return the schemas of the tools that a row names in the column data.tools_key. Raises DataError."""
    tools = row.get(data.tools_key) if data.tools_key and isinstance(row, dict) else None
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        raise DataError(
            f"{where}: {data.tools_key!r} (data.tools_key) must be a list of schemas, each an object, got "
            f"{cut(repr(tools), 60)}: write it as JSON Schema, or leave the column out"
        )
    return tools or []


def prompt_messages(row: dict[str, Any], data: Data) -> list[dict[str, Any]]:
    """Return the messages of a row that `prompt_text` accepts: its own, or one of the user."""
    value = row[data.input_key]
    if data.apply_chat_template and _is_chat(value):
        return [dict(message) for message in value]
    return [{"role": "user", "content": data.input_template.format(value) if data.input_template else value}]


def _no_token(text: str, tokenizer: Tokenizer, data: Data) -> str:
    """Say why a prompt has no token."""
    if not text.strip():
        return f"the prompt is empty: give {data.input_key!r} some text"
    return (
        f"the prompt {cut(text, 60)!r} gives no token: the tokenizer of {tokenizer.directory} knows none of its "
        "characters. Use a model that knows them, or leave the row out"
    )


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )

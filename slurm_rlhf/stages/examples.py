"""The examples of a stage as packed experience: answers to prompts, pairs of answers, or answers called good or bad."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.conversations import Conversation, Lesson, converse, encoded, turn_end
from slurm_rlhf.data.prompts import BadRow, prompt_messages, prompt_text, prompt_tools, prompts_of
from slurm_rlhf.data.rows import Row, cell, number, read_rows
from slurm_rlhf.data.tokenizer import Tokenizer, continuations
from slurm_rlhf.errors import DataError, ModelError, shortened
from slurm_rlhf.records import Experience, Prompt, Record, joined, packed
from slurm_rlhf.trainer.distributed import divided

RowAnswers = tuple[dict[str, Any], list[str] | Conversation, float]
"""(a row with its prompt, the answers to it or a whole conversation, the number that the row gives them)."""
NAMED = 5
"""Most kinds of unusable rows that a message names."""
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
PART = 1024
"""Rows that a rank reads at a time."""


class Examples(Record):
    """Hold prompts and answers; example i has the rows i * width to (i + 1) * width - 1."""

    experience: Experience  # answers, each with the end-of-sequence token, are responses; rewards: the row's number
    width: int  # sequences of an example
    places: list[str]  # where each example stands
    dropped: list[str]  # where those stand that have a sequence longer than data.max_len
    refused: list[str]  # errors of rows that are no examples

    def __len__(self) -> int:
        return len(self.experience) // self.width

    def contents(self) -> list[bytes]:
        """Return a hash of each example's tokens."""
        ids = np.split(self.experience.token_ids, self.experience.token_offsets[1:-1])[: len(self.experience)]
        firsts = range(0, len(ids), self.width)
        wholes = (b"|".join(part.tobytes() for part in ids[first : first + self.width]) for first in firsts)
        return [hashlib.blake2b(whole, digest_size=16).digest() for whole in wholes]

    def rows(self, examples: Sequence[int]) -> list[int]:
        """List the rows of the examples."""
        return [example * self.width + place for example in examples for place in range(self.width)]

    def lengths(self, part: Experience, packed: bool) -> list[int]:
        """Return the tokens of each example in a part of the experience, with padding unless it is packed."""
        lengths = part.lengths.reshape(-1, self.width)
        found: list[int] = (lengths.sum(axis=1) if packed else lengths.max(axis=1) * self.width).tolist()
        return found


class RefusedRows(DataError):
    """Report rows that are not examples, naming one of each kind; `examples` holds the examples of the other rows."""

    def __init__(self, path: Path, examples: Examples) -> None:
        rows, self.examples = examples.refused, examples
        several = f"{path}: {len(rows)} rows cannot be used: " if len(rows) > 1 else ""
        kinds: dict[str, list[str]] = {}
        for row in rows:
            kinds.setdefault(re.sub(r"\d+", "", row), []).append(row)
        named = [f"{first}{f' (and {len(more)} more like it)' if more else ''}" for first, *more in kinds.values()]
        super().__init__(several + shortened(named, NAMED, "; "))


def of_held_out(data: Data) -> Data:
    """Return the keys for reading examples that are not trained on: all rows of their file."""
    return replace(data, filter=[], weights=[], max_samples=0)


def load_examples(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
    """Load the rows' `data.input_key` and `data.output_key`; prompts are tokenized as PPO's prompts are.

    With `data.apply_chat_template` the answer may be messages. Those that begin with the assistant's follow the
    prompt, others are the whole conversation, which may be in `data.input_key`, too, in a row without an answer.
    Raises RefusedRows for rows that are not examples, DataError when none is left.
    """
    behind = turn_end(tokenizer)[1] if data.apply_chat_template else ""
    data = replace(data, chosen_key="", rejected_key="", label_key="")  # files may differ in what is not read

    def answered(row: Row, where: str) -> RowAnswers:
        alone = isinstance(row, dict) and data.output_key not in row and isinstance(row.get(data.input_key), list)
        column, key = (data.input_key, "data.input_key") if alone else (data.output_key, "data.output_key")
        value = cell(row, column, key, where)
        assert isinstance(row, dict)
        if isinstance(value, str):
            return row, [value], 0.0
        messages = isinstance(value, list) and value and all(isinstance(one, dict) and one.get("role") for one in value)
        if not (data.apply_chat_template and messages):
            needed = " or a list of messages with role and content" if data.apply_chat_template else ""
            remedy = ": messages need data.apply_chat_template = true" if messages else ""
            raise DataError(f"{where}: {column!r} must be a string{needed}, got {type(value).__name__}{remedy}")
        before = []
        if value[0]["role"] == "assistant" and not alone:
            prompt_text(row, where, tokenizer, data)  # raises what is wrong with the prompt
            before = prompt_messages(row, data)
        tools = prompt_tools(row, where, data)
        return row, converse([*before, *value], len(before), tokenizer, tools, where, behind), 0.0

    return _load(path, tokenizer, data, answered, 1)


def load_judged(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
    """Load answers with a label: row 2 i is an answer, its number 1 where it is good and 0 where it is bad.

    Row 2 i + 1 is the same prompt with the answer of the example half of the file away, by which KTO estimates its
    divergence. An answer is a text or messages, as in `load_pairs`. Raises RefusedRows for rows that are not examples,
    DataError when none is left.
    """

    def answered(row: Row, where: str) -> RowAnswers:
        answer, before = _last(cell(row, data.output_key, "data.output_key", where), data.output_key, where)
        good = cell(row, data.label_key, "data.label_key", where)
        if good not in (True, False):
            raise DataError(f"{where}: {data.label_key!r} (data.label_key) must be true or false, got {good!r}")
        return _with_prompt(row, before, data, where), [answer], float(good)

    alone = _load(path, tokenizer, data, answered, 1)
    one, lens, rows = alone.experience, alone.experience.prompt_lens, np.arange(len(alone))
    parts, others = np.split(one.token_ids, one.token_offsets[1:-1]), (rows + len(rows) // 2) % len(rows)
    fits = lens + one.response_lens[others] <= data.max_len
    kept = rows[fits]
    pairs = [_lesson(parts[row][: lens[row]], parts[each][lens[each] :]) for row in kept for each in (row, others[row])]
    if len(rows) < 2 or not pairs:
        raise DataError(f"{path}: {len(kept)} usable examples: KTO compares the answers of two, bring more")
    places, long = ([alone.places[row] for row in some] for some in (kept, rows[~fits]))
    numbers = np.repeat(one.rewards[kept], 2).tolist()
    return Examples(packed(pairs, numbers), 2, places, alone.dropped + long, [])


def load_pairs(path: Path, tokenizer: Tokenizer, data: Data, margins: bool = False) -> Examples:
    """Load pairs of answers to one prompt: row 2 i is the one in `data.chosen_key`, row 2 i + 1 the rejected one.

    An answer is a text, or a list of messages that ends with the assistant's. The prompt is in `data.input_key`, or it
    is the messages before the last one, the same in both (the implicit prompts of TRL); a text may hold them all. With
    `margins` the number of a pair is in `data.margin_key`, 0 where a row has none. Raises RefusedRows for rows that are
    no pairs, DataError when none is left.
    """
    data = replace(data, output_key="", label_key="")  # files may differ in what is not read

    def answered(row: Row, where: str) -> RowAnswers:
        keys = {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
        values = [cell(row, column, key, where) for key, column in keys.items()]
        if isinstance(row, dict) and data.input_key not in row:
            values = [_dialogue(value) for value in values]
        (chosen, before), (rejected, other) = (
            _last(value, column, where) for value, column in zip(values, keys.values(), strict=True)
        )
        if chosen == rejected:
            raise DataError(f"{where}: the chosen answer equals the rejected one: leave the row out")
        whole = _with_prompt(row, before if before == other else [], data, where)
        return whole, [chosen, rejected], _margin(whole, data.margin_key, where) if margins else 0.0

    return _load(path, tokenizer, data, answered, 2)


def _dialogue(value: Any) -> Any:
    """Return the messages of a text with all of a dialogue, as in HH-RLHF; anything else stays as it is."""
    before, *said = _SPEAKER.split(value) if isinstance(value, str) else [""]
    turns = [] if before.strip() else zip(said[::2], said[1::2], strict=True)
    return [{"role": _SPEAKERS[who], "content": words.strip()} for who, words in turns] or value


def _with_prompt(row: Row, before: list[Any], data: Data, where: str) -> dict[str, Any]:
    """Return the row with its prompt: its own, or the messages before all of its answers."""
    assert isinstance(row, dict)
    if data.input_key not in row and not before:
        raise DataError(
            f"{where}: no column {data.input_key!r} (columns: {', '.join(row)}), and no messages before the answers, "
            "or not the same prompt before both: set data.input_key, or leave the row out"
        )
    return {data.input_key: before, **row}


def _margin(row: dict[str, Any], column: str, where: str) -> float:
    value = row.get(column)
    margin = 0.0 if value is None else number(value)
    if margin is None or not math.isfinite(margin):
        raise DataError(f"{where}: {column!r} (data.margin_key) must be a number, got {value!r}")
    return margin


def _last(value: Any, column: str, where: str) -> tuple[str, list[Any]]:
    """Return the answer in `value`, and the messages before it."""
    if isinstance(value, str) and value:
        return value, []
    messages = isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    last = value[-1] if messages else {}
    words = last.get("content")
    if last.get("role") == "assistant" and not last.get("tool_calls") and isinstance(words, str) and words:
        return words, value[:-1]
    raise DataError(
        f"{where}: {column!r} must be a text, or a list of messages that ends with the assistant's words, which calls "
        "of tools are not"
    )


def _load(
    path: Path, tokenizer: Tokenizer, data: Data, answered: Callable[[Row, str], RowAnswers], width: int
) -> Examples:
    rows = read_rows(path, data.max_samples, data)
    some = iter(lambda: list(islice(rows, PART)), [])
    parts = divided((partial(_part, each, tokenizer, data, answered, width) for each in some), Examples)
    if not parts:
        raise DataError(f"{path}: the file holds no examples")
    names = ("places", "dropped", "refused")
    lists = ([each for part in parts for each in getattr(part, name)] for name in names)
    examples = Examples(joined([part.experience for part in parts]), width, *lists)
    if examples.refused:
        raise RefusedRows(path, examples)
    if not len(examples):
        raise DataError(f"{path}: every example is longer than data.max_len = {data.max_len} tokens: raise it")
    return examples


def _part(
    read: list[tuple[str, Row]],
    tokenizer: Tokenizer,
    data: Data,
    answered: Callable[[Row, str], RowAnswers],
    width: int,
) -> Examples:
    end = turn_end(tokenizer)[0] if data.apply_chat_template else ""
    answers: dict[int, list[str]] = {}
    conversations: dict[int, Conversation] = {}
    values = [0.0] * len(read)
    refused: dict[int, str] = {}

    def rows() -> Iterator[tuple[int, str, Row]]:
        for index, (where, row) in enumerate(read):
            try:
                whole, found, values[index] = answered(row, where)
            except (DataError, ModelError) as error:
                refused[index] = str(error)
                continue
            if isinstance(found, Conversation):
                conversations[index] = found
            else:
                answers[index] = found
                yield index, where, whole

    prompts: list[Prompt] = []
    for found in prompts_of(rows(), tokenizer, data, data.max_len - 1):
        if not isinstance(found, BadRow):
            prompts.append(found)
        elif not found.long:
            refused[found.index] = str(found.error)
    sequences = _continued(prompts, answers, tokenizer, data.apply_chat_template, end)
    talks = encoded([*conversations.values()], tokenizer, ends=not end)
    sequences |= {index: [talk] for index, talk in zip(conversations, talks, strict=True)}
    kept = [
        i
        for i in sorted(sequences)
        if all(len(one.prompt_ids) + len(one.response_ids) <= data.max_len for one in sequences[i])
    ]
    dropped = sorted({*range(len(read))} - {*kept, *refused})
    whole = packed([one for i in kept for one in sequences[i]], [values[i] for i in kept for _ in range(width)])
    places, long = ([read[i][0] for i in some] for some in (kept, dropped))
    return Examples(whole, width, places, long, [refused[i] for i in sorted(refused)])


def _continued(
    prompts: Sequence[Prompt], answers: dict[int, list[str]], tokenizer: Tokenizer, templated: bool, end: str
) -> dict[int, list[Lesson]]:
    """Encode the answers of each row after its prompt; each ends with `end`, or the end-of-sequence token."""
    repeated = [prompt for prompt in prompts for _ in answers[prompt.index]]
    texts = [text if text.endswith(end) else text + end for prompt in prompts for text in answers[prompt.index]]
    found: dict[int, list[Lesson]] = {}
    for prompt, ids in zip(repeated, continuations(repeated, texts, tokenizer, templated), strict=True):
        ended = bool(end) or ids[-1:] == [tokenizer.eos_token_id]
        whole = np.array(ids if ended else [*ids, tokenizer.eos_token_id], dtype=np.int32)
        found.setdefault(prompt.index, []).append(_lesson(prompt.token_ids, whole))
    return found


def _lesson(prompt: Any, response: Any) -> Lesson:
    return Lesson(prompt, response, np.ones(len(response), dtype=np.bool_))


def fingerprint(examples: Examples) -> str:
    """Return a hash of the examples' tokens and numbers, and of where answers begin and end."""
    experience, mask = examples.experience, examples.experience.action_mask
    digest = hashlib.sha256()
    for part in (experience.token_ids, experience.response_lens, experience.rewards, *(() if mask.all() else (mask,))):
        digest.update(part.data)
    return digest.hexdigest()

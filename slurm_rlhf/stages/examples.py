"""The examples of a stage as packed experience: answers to prompts, pairs of answers, or answers called good or bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.prompts import BadRow, prompts_of
from slurm_rlhf.data.rows import Row, cell, read_rows
from slurm_rlhf.data.tokenizer import Tokenizer, continuations
from slurm_rlhf.errors import DataError
from slurm_rlhf.records import Experience

Answered = tuple[dict[str, Any], list[str], float]
"""(a row with its prompt, the answers to it, the number that the row gives them)."""


@dataclass(slots=True)
class Examples:
    """Hold prompts and answers; example i has the rows i * width to (i + 1) * width - 1."""

    experience: Experience  # answers, each with the end-of-sequence token, are responses; rewards: the row's number
    places: list[str]  # where each example stands
    dropped: list[str]  # where those stand that have a sequence longer than data.max_len
    width: int = 1  # sequences of an example

    def __len__(self) -> int:
        return len(self.experience) // self.width

    def rows(self, examples: Sequence[int]) -> list[int]:
        """List the rows of the examples."""
        return [example * self.width + place for example in examples for place in range(self.width)]

    def lengths(self, part: Experience, packed: bool) -> list[int]:
        """Return the tokens of each example in a part of the experience, with padding unless it is packed."""
        lengths = part.lengths.reshape(-1, self.width)
        found: list[int] = (lengths.sum(axis=1) if packed else lengths.max(axis=1) * self.width).tolist()
        return found


def load_examples(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
    """Load the rows' `data.input_key` and `data.output_key`; prompts are tokenized as PPO's prompts are.

    Raises DataError with file and line for a row that is not an example, and when none is left.
    """

    def answered(row: Row, where: str) -> Answered:
        value = cell(row, data.output_key, "data.output_key", where)
        if not isinstance(value, str):
            raise DataError(f"{where}: {data.output_key!r} must be a string, got {type(value).__name__}")
        assert isinstance(row, dict)
        return row, [value], 0.0

    return _load(path, tokenizer, data, answered, 1)


def load_judged(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
    """Load answers with a label: row 2 i is an answer, its number 1 where it is good and 0 where it is bad.

    Row 2 i + 1 is the same prompt with the answer of the example half of the file away, by which KTO estimates its
    divergence. An answer is a text or messages, as in `load_pairs`. Raises DataError with file and line for a row that
    is not an example, and when none is left.
    """

    def answered(row: Row, where: str) -> Answered:
        answer, before = _last(cell(row, data.output_key, "data.output_key", where), data.output_key, where)
        good = cell(row, data.label_key, "data.label_key", where)
        if good not in (True, False):
            raise DataError(f"{where}: {data.label_key!r} (data.label_key) must be true or false, got {good!r}")
        return _with_prompt(row, before, data, where), [answer], float(good)

    alone = _load(path, tokenizer, data, answered, 1)
    one = alone.experience
    count, parts = len(alone), np.split(one.token_ids, one.token_offsets[1:-1])
    kept: list[tuple[Any, Any]] = []
    numbers: list[float] = []
    places: list[str] = []
    dropped = [*alone.dropped]
    for row in range(count):
        mine, other = one.prompt_lens[row], (row + count // 2) % count
        pair = [(parts[row][:mine], parts[each][one.prompt_lens[each] :]) for each in (row, other)]
        if mine + one.response_lens[other] <= data.max_len:
            kept += pair
            numbers += [float(one.rewards[row])] * 2
            places.append(alone.places[row])
        else:
            dropped.append(alone.places[row])
    if count < 2 or not kept:
        raise DataError(f"{path}: {len(places)} usable examples: KTO compares the answers of two, bring more")
    return Examples(_packed(kept, numbers), places, dropped, 2)


def load_pairs(path: Path, tokenizer: Tokenizer, data: Data, margins: bool = False) -> Examples:
    """Load pairs of answers to one prompt: row 2 i is the one in `data.chosen_key`, row 2 i + 1 the rejected one.

    An answer is a text, or a list of messages that ends with the assistant's. The prompt is in `data.input_key`, or it
    is the messages before the last one, the same in both (the implicit prompts of TRL). With `margins` the number of a
    pair is in `data.margin_key`, 0 where a row has none. Raises DataError with file and line for a row that is no pair,
    and when none is left.
    """

    def answered(row: Row, where: str) -> Answered:
        keys = {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
        values = [cell(row, column, key, where) for key, column in keys.items()]
        (chosen, before), (rejected, other) = (
            _last(value, column, where) for value, column in zip(values, keys.values(), strict=True)
        )
        if chosen == rejected:
            raise DataError(f"{where}: the chosen answer equals the rejected one: leave the row out")
        whole = _with_prompt(row, before if before == other else [], data, where)
        return whole, [chosen, rejected], _margin(whole, data.margin_key, where) if margins else 0.0

    return _load(path, tokenizer, data, answered, 2)


def _with_prompt(row: Row, before: list[Any], data: Data, where: str) -> dict[str, Any]:
    """Return the row with its prompt: its own, or the messages before all of its answers."""
    assert isinstance(row, dict)
    if data.input_key not in row and not before:
        raise DataError(
            f"{where}: no column {data.input_key!r} (data.input_key), and no messages before the answers, or not the "
            "same prompt before both"
        )
    return {data.input_key: before, **row}


def _margin(row: dict[str, Any], column: str, where: str) -> float:
    value = row.get(column)
    if value is None:
        return 0.0
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise DataError(f"{where}: {column!r} (data.margin_key) must be a number, got {value!r}")
    return margin


def _last(value: Any, column: str, where: str) -> tuple[str, list[Any]]:
    """Return the answer in `value`, and the messages before it."""
    if isinstance(value, str) and value:
        return value, []
    messages = isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    if messages and value[-1].get("role") == "assistant" and isinstance(value[-1].get("content"), str):
        return value[-1]["content"], value[:-1]
    raise DataError(f"{where}: {column!r} must be a text, or a list of messages that ends with the assistant's")


def _load(
    path: Path, tokenizer: Tokenizer, data: Data, answered: Callable[[Row, str], Answered], width: int
) -> Examples:
    answers: list[list[str]] = []
    values: list[float] = []
    places: list[str] = []

    def rows() -> Iterator[tuple[int, str, Row]]:
        for index, (where, row) in enumerate(read_rows(path, data.max_samples, data)):
            whole, found, value = answered(row, where)
            answers.append(found)
            values.append(value)
            places.append(where)
            yield index, where, whole

    sequences: list[tuple[Any, Any]] = []
    numbers: list[float] = []
    kept: list[int] = []
    prompts = []
    for found in prompts_of(rows(), tokenizer, data, data.max_len - 1):
        if not isinstance(found, BadRow):
            prompts.append(found)
        elif not found.long:
            raise found.error
    texts = [text for prompt in prompts for text in answers[prompt.index]]
    repeated = [prompt for prompt in prompts for _ in range(width)]
    continued = continuations(repeated, texts, tokenizer, data.apply_chat_template)
    for place in range(0, len(repeated), width):
        example = [
            (prompt.token_ids, np.array([*ids, tokenizer.eos_token_id], dtype=np.int32))
            for prompt, ids in zip(repeated[place : place + width], continued[place : place + width], strict=True)
        ]
        if all(len(prompt) + len(response) <= data.max_len for prompt, response in example):
            sequences += example
            kept.append(repeated[place].index)
            numbers += [values[kept[-1]]] * width
    if not answers:
        raise DataError(f"{path}: the file holds no examples")
    if not sequences:
        raise DataError(f"{path}: every example is longer than data.max_len = {data.max_len} tokens: raise it")
    dropped = [places[index] for index in sorted({*range(len(places))} - {*kept})]
    return Examples(_packed(sequences, numbers), [places[index] for index in kept], dropped, width)


def _packed(sequences: list[tuple[Any, Any]], numbers: list[float]) -> Experience:
    """Pack (prompt, response) of each sequence, and its number."""
    return Experience(
        np.array([len(prompt) for prompt, _ in sequences], dtype=np.int32),
        np.array([len(response) for _, response in sequences], dtype=np.int32),
        np.concatenate([part for pair in sequences for part in pair]),
        np.ones(sum(len(response) for _, response in sequences), dtype=np.bool_),
        np.array(numbers, dtype=np.float32),
    )

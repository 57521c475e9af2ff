"""Makes prompts of the rows of a job, or says why a row has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import CHUNK, Row, encode_up_to, prompt_text, read_rows, require_column
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError, ModelError
from slurm_rlhf.records import Prompt


@dataclass(frozen=True, slots=True)
class BadRow:
    """Says why a row has no prompt for an engine."""

    index: int
    why: str
    text: str | None = None


@dataclass(slots=True)
class PromptRows:
    """Tokenizes rows of the file when they are needed."""

    config: Config
    tokenizer: Tokenizer
    rows: list[Row]

    @classmethod
    def read(cls, config: Config, model: Path) -> PromptRows:
        """Read the file. Raises DataError if no row can be used, ModelError for a missing chat template."""
        dataset = Path(config.generate.dataset)
        rows = read_rows(dataset, config.generate.max_samples)
        require_column(rows, config.data.input_key, dataset)
        tokenizer = Tokenizer.load(model)
        if config.data.apply_chat_template:
            tokenizer.chat([{"role": "user", "content": "2+2="}])
        return cls(config, tokenizer, rows)

    def __len__(self) -> int:
        return len(self.rows)

    def prompts(self, numbers: Sequence[int]) -> Iterator[Prompt | BadRow]:
        """Yield the prompts of rows, in the order of `numbers`."""
        for begin in range(0, len(numbers), CHUNK):
            yield from self._chunk(numbers[begin : begin + CHUNK])

    def _chunk(self, numbers: Sequence[int]) -> list[Prompt | BadRow]:
        texts = {number: self._text(number) for number in numbers}
        good = {number: text for number, text in texts.items() if isinstance(text, str)}
        data, longest = self.config.data, self.config.data.max_len - self.config.rollout.max_new_tokens
        encoded = encode_up_to([*good.values()], self.tokenizer, data, longest)
        ids = dict(zip(good, encoded, strict=True))
        return [
            text if isinstance(text, BadRow) else self._prompt(number, text, ids[number], longest)
            for number, text in texts.items()
        ]

    def _text(self, number: int) -> str | BadRow:
        row, where = self.rows[number], f"row {number}"
        if isinstance(row, DataError):
            return BadRow(number, str(row))
        try:
            return prompt_text(row, where, self.tokenizer, self.config.data)
        except (DataError, ModelError) as error:
            return BadRow(number, str(error))

    def _prompt(self, number: int, text: str, ids: list[int] | str, longest: int) -> Prompt | BadRow:
        if isinstance(ids, str):
            return BadRow(number, f"row {number}: {ids}", text)
        if len(ids) > longest:
            return BadRow(
                number,
                f"row {number}: the prompt is longer than {longest} tokens, and with rollout.max_new_tokens = "
                f"{self.config.rollout.max_new_tokens} it does not fit into data.max_len = {self.config.data.max_len}",
                text,
            )
        row = self.rows[number]
        assert not isinstance(row, DataError)
        return Prompt(number, text, np.asarray(ids, dtype=np.int32), row.get(self.config.data.label_key), row)

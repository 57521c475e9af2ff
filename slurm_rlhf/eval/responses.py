"""Describe scored responses, find the answer in one, and write them to a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.run_directory import write_atomically


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """Holds a response to a prompt of an evaluation, and its score."""

    dataset: str
    index: int  # row of the prompt in its file
    sample: int  # 0 .. n-1
    source: str  # source of the prompt; empty: the data set names none
    prompt: str
    response: str
    label: Any
    answer: str | None  # answer found in the response; None: the pattern finds none
    score: float
    reward: float
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    engine: int = 0
    error: str = ""  # reason why there is no response, whose score is then 0


def answer_of(response: str, pattern: str) -> str | None:
    """Find the answer that a response gives, to compare it with others.

    The last match of the regular expression `pattern`, its group if it has one; None where it matches nowhere. Without
    a pattern the whole response. Blanks around it do not count.
    """
    if not pattern:
        return response.strip()
    found = list(re.finditer(pattern, response, re.DOTALL))
    if not found:
        return None
    last = found[-1]
    return (last.group(1) if last.re.groups else last.group()).strip()


def write_responses(path: Path, responses: Iterable[ScoredResponse]) -> None:
    """Replace `path` by one JSON object a line, in one step. Raises OSError, and leaves an earlier file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One line at a time: the text of a whole evaluation may be larger than the memory that is left.
    lines = (json.dumps(asdict(response), ensure_ascii=False) + "\n" for response in responses)
    write_atomically(path, lines, errors="replace")

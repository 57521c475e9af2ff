"""Keep a few responses of each step: samples.jsonl, one line each, and how one looks as text."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Container
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import cut, printable
from slurm_rlhf.observe.jsonl import append_line, iterate_rows


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a response with all that is known of it. Lists have one entry per response token, or none."""

    step: int
    prompt_index: int  # the row of the data set
    sample: int  # number of the response among those to the prompt
    prompt: str
    response: str
    label: Any  # the label that the reward function got, as text if it is no plain value
    reward: float | None  # the reward function's answer; None for NaN
    score: float | None  # None: it says none
    advantage: float | None  # mean over the response's tokens
    finish_reason: str
    engine: int
    version: int  # version of the policy that sampled its first token
    tokens: list[str]  # together they are the response, with special tokens
    logprobs: list[float | None]  # the engine's
    actor_logprobs: list[float | None]  # the actor's, before the update


def choose(seed: int, step: int, count: int, total: int) -> list[int]:
    """Draw `count` of `total` responses of a step, in order; the same in every run with this seed."""
    return sorted(random.Random(f"{seed} samples {step}").sample(range(total), min(count, total)))


class SampleLog:
    """Append samples to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, sample: Sample) -> None:
        """Write one line. Raises OSError."""
        append_line(self._path, asdict(sample))


def read_samples(path: Path, wanted: Container[int] | None = None) -> list[Sample]:
    """Read the samples in the lines `wanted` (None: in all); lines that hold something else are skipped."""
    names = [field.name for field in fields(Sample)]
    try:
        rows = [row for row in iterate_rows(path, wanted=wanted) if row.keys() >= set(names)]
    except OSError:
        return []
    return [Sample(**{name: row[name] for name in names}) for row in rows]


def console_text(sample: Sample, width: int = 100, most: int = 600) -> str:
    """Write a sample for a terminal or a log file: control characters as escapes, long texts cut."""
    said = f"reward {_number(sample.reward)}"
    if sample.score is not None:
        said += f", score {_number(sample.score)}"
    head = f"sample of step {sample.step}, prompt {sample.prompt_index}: {said}, {sample.finish_reason}"
    return "\n".join([head, *_lines("> ", sample.prompt, width, most), *_lines("< ", sample.response, width, most)])


def markdown_text(sample: Sample) -> str:
    """Write a sample for TensorBoard, which shows Markdown: texts as indented code, so that nothing in them counts."""
    head = f"step {sample.step}, prompt {sample.prompt_index}: reward {_number(sample.reward)}, {sample.finish_reason}"
    return f"{head}\n\nprompt\n\n{_code(sample.prompt)}\n\nresponse\n\n{_code(sample.response)}\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _code(text: str) -> str:
    return textwrap.indent(text or " ", "    ", lambda line: True)


def _lines(mark: str, text: str, width: int, most: int) -> list[str]:
    found = []
    for line in cut(text, most).splitlines() or [""]:
        found += textwrap.wrap(printable(line.replace("\t", "\\t")), width - 4, drop_whitespace=False) or [""]
    return [f"  {mark}{line}" for line in found]

"""Make the input of reward functions: an item for each response, of plain values that travel to workers and servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from slurm_rlhf.records import Prompt, Trajectory


class Item(TypedDict):
    """Describes a response, with the prompt that it answers."""

    prompt: str  # as the model got it, template included
    messages: list[dict[str, Any]] | None  # the prompt as messages; None: it is a plain text, without an environment
    response: str
    dialogue: list[dict[str, Any]]  # messages after the prompt, those of the policy as `assistant`
    prompt_ids: list[int]
    response_ids: list[int]
    label: Any
    row: dict[str, Any]  # all columns of the data
    finish_reason: str
    version: int  # the oldest policy that sampled a token of it
    turns: int


def items_of(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], input_key: str = "input") -> list[Item]:
    """Make the items of `trajectories`; `prompts[i]` is the prompt of `trajectories[i]`."""
    return [
        Item(
            prompt=found.began or prompt.text,
            messages=_messages(prompt, found, prompt.row.get(input_key)),
            response=found.text,
            dialogue=json.loads(found.dialogue) if found.dialogue else answered(found.text),
            prompt_ids=found.prompt_ids.tolist(),
            response_ids=found.response_ids.tolist(),
            label=prompt.label,
            row=prompt.row,
            finish_reason=found.finish_reason,
            version=min((span.version for span in found.versions), default=0),
            turns=found.turns,
        )
        for prompt, found in zip(prompts, trajectories, strict=True)
    ]


def answered(text: str) -> list[dict[str, Any]]:
    """Return a dialogue that has one message of the policy."""
    return [{"role": "assistant", "content": text}]


def last_turn(item: Item) -> str:
    """Return what the policy wrote last; without an environment the response."""
    return str(item["dialogue"][-1]["content"])


def _messages(prompt: Prompt, found: Trajectory, given: Any) -> list[dict[str, Any]] | None:
    if found.messages or isinstance(given, list):
        return json.loads(found.messages) if found.messages else given
    return [{"role": "user", "content": prompt.text if given is None else str(given)}] if found.dialogue else None


def by_prompt(prompts: Sequence[Prompt]) -> list[list[int]]:
    """List, for each prompt, the indices of its responses, which follow one another in `prompts`."""
    return [[*places] for _, places in groupby(range(len(prompts)), key=lambda place: id(prompts[place]))]

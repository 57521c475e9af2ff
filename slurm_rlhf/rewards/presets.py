"""Rewards that need no code: reward.preset. They run in workers, as a user's function does.

Most rewards are 1 or 0; those of length, code and reasoning_gym lie between. An episode is judged by its last turn, not
by texts of its environment. To add one: a function in `PRESETS`, its name in `reward.preset`, and the library that it
needs, if any, in `config.reward_sources.PRESET_LIBRARIES` and the extra `rewards`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import RewardError
from slurm_rlhf.rewards.items import Item, last_turn
from slurm_rlhf.rewards.reasoning_gym import task_score
from slurm_rlhf.sandbox.box import Test, chosen, read_tests, share_passed
from slurm_rlhf.wire import timeouts

Score = Callable[[Item], float | None]


def _exact(value: str) -> Score:
    """Compare the whole turn with the label, without space around them."""
    return lambda item: float(last_turn(item).strip() == _label(item))


def _regex(value: str) -> Score:
    """Search for the pattern; where it has a group, the group of the last match has to be the label."""
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise RewardError(f"reward.preset_value = {value!r} is no regular expression: {error}") from None

    def score(item: Item) -> float:
        found = [*pattern.finditer(last_turn(item))]
        if not found or not pattern.groups:
            return float(bool(found))
        return float((found[-1].group(1) or "").strip() == _label(item))

    return score


def _json_schema(value: str) -> Score:
    """Read the response as JSON, and check it by a schema."""
    import jsonschema

    try:
        schema = json.loads(Path(value).read_text(encoding="utf-8"))
        made = jsonschema.validators.validator_for(schema)
        made.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        said = getattr(error, "message", str(error))
        raise RewardError(f"reward.preset_value: {value} is no file with a JSON schema: {said}") from None
    validator = made(schema)

    def score(item: Item) -> float:
        try:
            return float(validator.is_valid(json.loads(last_turn(item))))
        except (ValueError, RecursionError):  # nested too deeply to be read, or compared with the schema
            return 0.0

    return score


def _length(value: str) -> Score:
    """Give 1 up to `value` tokens, then less, down to 0 at twice as many."""
    if not value.isdigit() or not int(value):
        raise RewardError(f"reward.preset_value = {value!r}: the preset length takes a number of tokens, from 1 up")
    return lambda item: min(1.0, max(0.0, 2.0 - len(item["response_ids"]) / int(value)))


def _math(value: str) -> Score:
    """Compare the answer in the response with the label as mathematics, by math-verify; None: the row has no label.

    An answer that takes too long to be read or compared gets 0.
    """
    import math_verify

    def read(text: str) -> Any:
        return math_verify.parse(text, parsing_timeout=timeouts.MATH_S)

    def score(item: Item) -> float | None:
        if item["label"] is None:
            return None
        gold = read(_label(item)) or read(f"${_label(item)}$")
        return float(math_verify.verify(gold, read(last_turn(item)), timeout_seconds=timeouts.MATH_S))

    return score


TESTS = "tests"
"""Column of the row that holds its tests; where there is none the label does."""


def code_score(sandbox: str) -> Score:
    """Find the kind of sandbox, and return the function that scores a response by the share of its tests it passes.

    Raises ConfigError where this node has no such sandbox. The function raises RewardError for a row without tests, and
    OSError where the sandbox does not start.
    """
    kind = chosen(sandbox)
    return lambda item: share_passed(last_turn(item), tests_of(item), kind)


def tests_of(item: Item) -> list[Test]:
    """Read the tests of an item's row. Raises RewardError."""
    value = item["row"].get(TESTS, item["label"])
    if value is None:
        raise RewardError(
            f"reward.preset = code: the row has neither a column {TESTS!r} nor a label (columns: "
            f"{', '.join(item['row'])}): bring its tests, or name their column in data.label_key"
        )
    return read_tests(value)


PRESETS: dict[str, Callable[[str], Score]] = {
    "exact": _exact,
    "regex": _regex,
    "json_schema": _json_schema,
    "length": _length,
    "math": _math,
    "code": code_score,
    "reasoning_gym": lambda value: task_score,
}
"""Name -> function that makes the scorer, from reward.preset_value; for `code`, from reward.sandbox."""


class Preset:
    """Scores responses by one of `PRESETS`."""

    def __init__(self, name: str, value: str) -> None:
        """Raise RewardError for a value that the preset does not take."""
        self._name, self._score = name, PRESETS[name](value)

    def about(self) -> list[Any]:
        """Return the preset's name for messages, and True: a reward may be None."""
        return [f"reward.preset = {self._name}", True]

    def answer(self, items: Sequence[Item], step: int) -> dict[str, Any]:
        """Compute the rewards of `items`, which are their scores, too."""
        rewards = [self._score(item) for item in items]
        return {"rewards": rewards, "scores": [reward or 0.0 for reward in rewards]}


def _label(item: Item) -> str:
    return str(item["label"]).strip()

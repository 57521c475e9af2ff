"""Read the answer of a reward function into arrays; anything unexpected is an error that says where it is wrong.

Knows lists, tuples, numpy arrays and tensors of any library by their `tolist`; imports none of them but numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import F32

LARGEST = float(np.finfo(np.float32).max)
KEYS = ("rewards", "scores", "extra_logs")


@dataclass(slots=True)
class Rewards:
    """Hold one entry per response, [N]."""

    rewards: F32
    scores: F32 | None = None  # how good the response is by the task's own measure, e.g. 1 if it is correct
    extra_logs: dict[str, F32] = field(default_factory=dict)  # name -> values to average and log, [N] or [1]

    def part(self, start: int, end: int) -> Rewards:
        """Return the entries of the responses [start, end); a value for all of them is that of each."""
        logs = {
            name: values[start:end] if len(values) == len(self.rewards) else values
            for name, values in self.extra_logs.items()
        }
        return Rewards(self.rewards[start:end], None if self.scores is None else self.scores[start:end], logs)


def joined(parts: Sequence[Rewards]) -> Rewards:
    """Join the rewards of several calls of one function; a value for all responses of a call becomes one for each."""
    scores = [part.scores for part in parts if part.scores is not None]
    logs: dict[str, list[F32]] = {}
    for part in parts:
        for name, values in part.extra_logs.items():
            logs.setdefault(name, []).append(np.broadcast_to(values, (len(part.rewards),)))
    return Rewards(
        np.concatenate([part.rewards for part in parts]),
        np.concatenate(scores) if len(scores) == len(parts) else None,
        {name: np.concatenate(values) for name, values in logs.items()},
    )


def parse_answer(answer: Any, count: int, where: str) -> Rewards:
    """Read the answer of a reward function for `count` responses: numbers, or {"rewards", "scores"?, "extra_logs"?}.

    Raises RewardError, its message starting with `where`, for another number of values, for values that are no finite
    number, and for keys that have no meaning.
    """
    if not isinstance(answer, dict):
        return Rewards(_numbers(answer, count, f"{where} returned", "rewards"))
    unknown = [key for key in answer if key not in KEYS]
    if unknown:
        raise RewardError(f"{where} returned a dict with the unknown key {unknown[0]!r}; valid: {', '.join(KEYS)}")
    if "rewards" not in answer:
        held = ", ".join(map(repr, answer)) or "nothing"
        raise RewardError(f"{where} returned a dict without 'rewards'; it holds {held}")
    scores = answer.get("scores")
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise RewardError(f"{where} returned 'extra_logs' as {type(logs).__name__}; expected a dict of name -> numbers")
    return Rewards(
        _numbers(answer["rewards"], count, f"{where} returned in 'rewards'", "rewards"),
        None if scores is None else _numbers(scores, count, f"{where} returned in 'scores'", "scores"),
        {
            str(name): _log_values(values, count, f"{where} returned in extra_logs[{name!r}]")
            for name, values in logs.items()
        },
    )


def _log_values(values: Any, count: int, told: str) -> F32:
    """Read one number per response, or one for all."""
    plain = _plain(values)
    if isinstance(plain, (list, tuple)):
        return _numbers(plain, count, told, "values")
    return _numbers([plain], 1, told, "values")


def _numbers(values: Any, count: int, told: str, noun: str) -> F32:
    values = _plain(values)
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"{told} {_shown(values)}; expected a list, array or tensor of {count} numbers")
    if len(values) != count:
        raise RewardError(f"{told} {len(values)} {noun} for {count} responses; return one per response, in their order")
    return np.array([_number(value, index, told) for index, value in enumerate(values)], dtype=np.float32)


def _number(value: Any, index: int, told: str) -> float:
    value = _plain(value)
    if not isinstance(value, (int, float)):
        raise RewardError(f"{told} {_shown(value)} at index {index}; expected a number")
    # In float32, as it will be used: 1e39 is infinite there.
    if not abs(value) <= LARGEST:
        raise RewardError(f"{told} {_shown(value)} at index {index}; expected a finite number")
    return float(value)


def _plain(value: Any) -> Any:
    """Turn arrays, tensors and their scalars into Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"

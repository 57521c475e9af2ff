"""Read the answer of a reward function into arrays; anything unexpected is an error that says where it is wrong.

Knows lists, tuples, numpy arrays and tensors of any library by their `tolist`; imports none of them but numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import F32

LARGEST = float(np.finfo(np.float32).max)
KEYS = ("rewards", "scores", "components", "extra_logs")


@dataclass(slots=True)
class Rewards:
    """Hold one entry per response, [N]."""

    rewards: F32
    scores: F32 | None = None  # how good the response is by the task's own measure, e.g. 1 if it is correct
    extra_logs: dict[str, F32] = field(default_factory=dict)  # name -> values to average and log, [N] or [1]
    components: dict[str, F32] = field(default_factory=dict)  # name -> [N], the parts of the reward

    def permuted(self, order: NDArray[np.int64]) -> Rewards:
        """Give response i what response order[i] has, but for what is only logged."""
        scores = None if self.scores is None else self.scores[order]
        components = {name: values[order] for name, values in self.components.items()}
        return Rewards(self.rewards[order], scores, self.extra_logs, components)

    def part(self, start: int, end: int) -> Rewards:
        """Return the entries of the responses [start, end); a value for all of them is that of each."""
        logs = {
            name: values[start:end] if len(values) == len(self.rewards) else values
            for name, values in self.extra_logs.items()
        }
        scores = None if self.scores is None else self.scores[start:end]
        components = {name: values[start:end] for name, values in self.components.items()}
        return Rewards(self.rewards[start:end], scores, logs, components)


def joined(parts: Sequence[Rewards]) -> Rewards:
    """Join the rewards of several calls of one function; a value for all responses of a call becomes one for each.

    Raises RewardError where the calls answered different components, or scores in some of them only.
    """
    kinds = {(part.scores is not None, tuple(sorted(part.components))) for part in parts}
    if len(kinds) > 1:
        unlike = " and ".join(
            f"{'scores' if scored else 'no scores'}, components {list(names)}" for scored, names in kinds
        )
        raise RewardError(f"calls of the reward function answered {unlike}: answer the same keys in each call")
    scores = [part.scores for part in parts if part.scores is not None]
    logs: dict[str, list[F32]] = {}
    for part in parts:
        for name, values in part.extra_logs.items():
            logs.setdefault(name, []).append(np.broadcast_to(values, (len(part.rewards),)))
    return Rewards(
        np.concatenate([part.rewards for part in parts]),
        np.concatenate(scores) if scores else None,
        {name: np.concatenate(values) for name, values in logs.items()},
        {name: np.concatenate([part.components[name] for part in parts]) for name in parts[0].components},
    )


def parse_answer(answer: Any, count: int, where: str) -> Rewards:
    """Read the answer of a reward function for `count` responses: numbers, or a dict of them with `KEYS`.

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
    logs, components = (_named(answer.get(key) or {}, key, where) for key in ("extra_logs", "components"))
    if twice := [name for name in components if name in logs]:
        raise RewardError(
            f"{where} returned {twice[0]!r} in 'components' and in 'extra_logs': components are logged, too; leave it "
            "out of 'extra_logs'"
        )
    return Rewards(
        _numbers(answer["rewards"], count, f"{where} returned in 'rewards'", "rewards"),
        None if scores is None else _numbers(scores, count, f"{where} returned in 'scores'", "scores"),
        {
            name: _log_values(values, count, f"{where} returned in extra_logs[{name!r}]")
            for name, values in logs.items()
        },
        {
            name: _numbers(values, count, f"{where} returned in components[{name!r}]", "values")
            for name, values in components.items()
        },
    )


def _named(values: Any, key: str, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise RewardError(f"{where} returned {key!r} as {type(values).__name__}; expected a dict of name -> numbers")
    return {str(name): found for name, found in values.items()}


def _log_values(values: Any, count: int, where: str) -> F32:
    """Read one number per response, or one for all."""
    plain = _plain(values)
    if isinstance(plain, (list, tuple)):
        return _numbers(plain, count, where, "values")
    return _numbers([plain], 1, where, "values")


def _numbers(values: Any, count: int, where: str, noun: str) -> F32:
    values = _plain(values)
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"{where} {_shown(values)}; expected a list, array or tensor of {count} numbers")
    if len(values) != count:
        raise RewardError(
            f"{where} {len(values)} {noun} for {count} responses; return one per response, in their order"
        )
    return np.array([_number(value, index, where) for index, value in enumerate(values)], dtype=np.float32)


def _number(value: Any, index: int, where: str) -> float:
    value = _plain(value)
    if not isinstance(value, (int, float)):
        raise RewardError(f"{where} {_shown(value)} at index {index}; expected a number")
    # In float32, as it will be used: 1e39 is infinite there.
    if not abs(value) <= LARGEST:
        raise RewardError(f"{where} {_shown(value)} at index {index}; expected a finite number")
    return float(value)


def _plain(value: Any) -> Any:
    """Turn arrays, tensors and their scalars into Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"

"""Read what a source of rewards answers into arrays; anything unexpected is an error that says where it is wrong.

Lists, tuples, numpy arrays and tensors of any library are known by their `tolist`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.errors import RewardError, cut
from slurm_rlhf.records import F32, Bool

LARGEST = float(np.finfo(np.float32).max)
KEYS = ("rewards", "scores", "components", "extra_logs")


@dataclass(slots=True)
class Rewards:
    """Hold one entry per response, [N]."""

    rewards: F32
    scores: F32 | None = None  # how good the response is by the task's own measure, e.g. 1 if it is correct
    extra_logs: dict[str, F32] = field(default_factory=dict)  # name -> values to average and log, [N] or [1]
    components: dict[str, F32] = field(default_factory=dict)  # name -> [N], the parts of the reward
    skipped: Bool | None = None  # [N], responses without a reward, which are not trained on; None: there are none
    failed: NDArray[np.str_] | None = None  # [N], `KIND: why` of each that could not be computed; empty: it could

    def select(self, rows: slice) -> Rewards:
        """Return the entries of the responses `rows`, in that order; a value for all of them is that of each."""

        def chosen(named: dict[str, F32]) -> dict[str, F32]:
            return {name: found[rows] if len(found) == len(self.rewards) else found for name, found in named.items()}

        scores = None if self.scores is None else self.scores[rows]
        skipped = None if self.skipped is None else self.skipped[rows]
        failed = None if self.failed is None else self.failed[rows]
        return Rewards(self.rewards[rows], scores, chosen(self.extra_logs), chosen(self.components), skipped, failed)


def joined(parts: Sequence[Rewards]) -> Rewards:
    """Join the rewards of several calls of one function; a value for all responses of a call becomes one for each.

    One that failed has the score 0, and its reward is that of each component. Raises RewardError where the calls
    answered different components, or scores in some of them only.
    """
    sound = [part for part in parts if part.failed is None] or parts
    kinds = {(part.scores is not None, tuple(sorted(part.components))) for part in sound}
    if len(kinds) > 1:
        unlike = " and ".join(
            f"{'scores' if scored else 'no scores'}, components {list(names)}" for scored, names in kinds
        )
        raise RewardError(f"calls of the reward function answered {unlike}: answer the same keys in each call")
    scored, names = sound[0].scores is not None, [*sound[0].components]
    scores = [np.zeros_like(part.rewards) if part.scores is None else part.scores for part in parts if scored]
    logs: dict[str, list[F32]] = {}
    for part in parts:
        for name, values in part.extra_logs.items():
            logs.setdefault(name, []).append(np.broadcast_to(values, (len(part.rewards),)))
    return Rewards(
        np.concatenate([part.rewards for part in parts]),
        np.concatenate(scores) if scores else None,
        {name: np.concatenate(values) for name, values in logs.items()},
        {name: np.concatenate([part.components.get(name, part.rewards) for part in parts]) for name in names},
        _joined([part.skipped for part in parts], parts, np.bool_),
        _joined([part.failed for part in parts], parts, np.str_),
    )


def _joined(found: Sequence[NDArray[Any] | None], parts: Sequence[Rewards], kind: type) -> NDArray[Any] | None:
    if all(each is None for each in found):
        return None
    pairs = zip(found, parts, strict=True)
    return np.concatenate([np.zeros(len(part.rewards), kind) if each is None else each for each, part in pairs])


def parse_answer(answer: Any, count: int, where: str, none: bool = False) -> Rewards:
    """Read the answer of a reward function for `count` responses: numbers, or a dict of them with `KEYS`.

    `none`: a reward may be None where it does not apply to the response, which is skipped then.

    Raises RewardError, its message starting with `where`, for another number of values, for values that are no finite
    number, and for keys that have no meaning.
    """
    given = _plain(answer.get("rewards") if isinstance(answer, dict) else answer)
    if none and isinstance(given, list | tuple) and None in given:
        filled = [0.0 if value is None else value for value in given]
        found = parse_answer({**answer, "rewards": filled} if isinstance(answer, dict) else filled, count, where)
        found.skipped = np.array([value is None for value in given])
        return found
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
    return f"{cut(repr(value), 80)} ({type(value).__name__})"

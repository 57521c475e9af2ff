"""Check the answer of a source of rewards and convert it to arrays; an error says what is wrong in it, and where.

An answer may hold lists, tuples, numpy arrays, and tensors of any library that have `tolist`.

`Scoring` computes rewards in the background, by a function or by the reward model's ranks, and waits until a deadline.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.algorithms.reward_shaping import FixedScale, RewardScale, RunningScale
from slurm_rlhf.config.check import reward_statistics
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, cut
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import F32, LOST, Bool, Prompt, Trajectory, pack
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.wire.calls import ForwardBatch, RewardCalls
from slurm_rlhf.wire.handles import RoleHandle, gather, send_shards

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
        """Return the entries of the responses `rows`, in that order; a value of length 1, for all, is kept."""

        def chosen(named: dict[str, F32]) -> dict[str, F32]:
            return {name: found[rows] if len(found) == len(self.rewards) else found for name, found in named.items()}

        scores = None if self.scores is None else self.scores[rows]
        skipped = None if self.skipped is None else self.skipped[rows]
        failed = None if self.failed is None else self.failed[rows]
        return Rewards(self.rewards[rows], scores, chosen(self.extra_logs), chosen(self.components), skipped, failed)


def joined(parts: Sequence[Rewards]) -> Rewards:
    """Join the rewards of several calls of one function; a value for all responses of a call becomes one for each.

    A failed reward gets the score 0, and counts as the value of each component. Raises RewardError if the calls
    returned different components, or only some of them scores.
    """
    sound = [part for part in parts if part.failed is None] or parts
    kinds = {(part.scores is not None, tuple(sorted(part.components))) for part in sound}
    if len(kinds) > 1:
        unlike = " and ".join(
            f"{'scores' if scored else 'no scores'}, components {list(names)}" for scored, names in kinds
        )
        raise RewardError(f"calls of the reward function returned {unlike}: return the same keys in each call")
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
    several = isinstance(plain, (list, tuple))
    return _numbers(plain if several else [plain], count if several else 1, where, "values")


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


RewardSource = Callable[[list[Prompt], list[Trajectory], int], Rewards]
"""(prompt of each response, responses, number of the training step) -> rewards."""


@dataclass(frozen=True, slots=True)
class ModelRewards:
    """Spread responses over the ranks of the reward role."""

    role: RoleHandle[RewardCalls]
    max_tokens: int  # tokens of a micro-batch at most

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N], from any thread; a model ignores `step`.

        Raises RunError, and RewardError for a NaN.
        """
        experience = pack(trajectories, [0.0] * len(trajectories))
        # All ranks need the same number of responses, and an evaluation may have any: the last one is repeated.
        count = len(experience)
        filled = [*range(count), *[count - 1] * (-count % self.role.world)]
        whole = experience.select(filled)
        parts, calls = send_shards(self.role, RewardCalls.score, ForwardBatch, whole, self.max_tokens)
        scores = np.full(len(filled), np.nan, dtype=np.float32)
        for part, answer in zip(parts, gather(calls), strict=True):
            scores[part.indices] = answer
        return parse_answer(scores[:count], count, "the reward model")


def episode_rewards(prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
    """Return the rewards, scores and logs that environments have given `trajectories`, [N]; 0 without environments.

    Lost episodes are skipped.
    """
    lost = np.array([one.finish_reason == LOST for one in trajectories], dtype=np.bool_)
    scored = any(one.score is not None for one in trajectories)
    names = sorted({name for one in trajectories for name in one.logs})
    logs = {name: [one.logs[name] for one in trajectories if name in one.logs] for name in names}
    return Rewards(
        np.array([one.reward for one in trajectories], dtype=np.float32),
        np.array([one.score or 0.0 for one in trajectories], dtype=np.float32) if scored else None,
        {name: np.array([np.mean(values)], dtype=np.float32) for name, values in logs.items()},
        skipped=lost if lost.any() else None,
    )


def reward_scale(config: Config) -> tuple[RewardScale | None, str]:
    """Make the scale that reward.normalize_enable asks for, and a line about it for the user. Raises ModelError."""
    if not config.reward.normalize_enable:
        return None, ""
    model = config.reward.model_name_or_path
    known = reward_statistics(model) if model else None
    if known is None:
        return RunningScale(), "rewards are normalised by mean and standard deviation of all rewards of the run so far"
    mean, std = known
    return FixedScale(mean, std), f"rewards are normalised by {model}/config.json: mean {mean:g}, std {std:g}"


@dataclass(frozen=True, slots=True)
class Scoring:
    """Compute rewards for training and evaluation in the background, and wait for them until a deadline.

    So a signal can interrupt the main thread while it waits, whatever the user's function does.
    """

    source: RewardSource
    timeout_s: float  # how long a reward function may take; calls to a reward model have deadlines of their own
    printed: Path | None = None  # the file for the traceback of what a reward function raises; None: there is none
    note: Callable[[str], None] = lambda text: None  # tells the user of rewards that failed

    @property
    def streams(self) -> bool:
        """Tell whether the responses to a prompt may be scored while others are sampled."""
        return getattr(self.source, "streams", False)

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; `step` as in `RewardFunction`. Blocks; raises as `wait`."""
        return self.wait([self.begin(prompts, trajectories, step)], len(trajectories), step)

    def begin(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Future[Rewards]:
        """Start computing the rewards of `trajectories`."""
        return in_thread(partial(self._call, prompts, trajectories, step), "reward")

    def begin_each(
        self, prompts: list[Prompt], trajectories: list[Trajectory], step: int, size: int
    ) -> list[Future[Rewards]]:
        """Start one call, as `begin`; return the rewards of each `size` responses that follow one another."""
        found = [Future[Rewards]() for _ in range(len(trajectories) // size)]

        def share(call: Future[Rewards]) -> None:
            for index, part in enumerate(found):
                if (error := call.exception()) is not None:
                    part.set_exception(error)
                else:
                    part.set_result(call.result().select(slice(index * size, (index + 1) * size)))

        self.begin(prompts, trajectories, step).add_done_callback(share)
        return found

    def _call(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        try:
            return self.source(prompts, trajectories, step)
        except RewardError as error:
            if self.printed is None or not isinstance(self.source, RewardFunction):
                raise
            with self.printed.open("a", encoding="utf-8", errors="replace") as log:
                traceback.print_exception(error, file=log)
            raise RewardError(f"{error} (traceback: {self.printed})") from error

    def wait(self, asked: Sequence[Future[Rewards]], count: int, step: int) -> Rewards:
        """Wait for the rewards of `count` responses. Raises RewardError after the deadline, or what it raised."""
        timeout_s = self.timeout_s if isinstance(self.source, RewardFunction) else None
        try:
            found = joined([scored.result(timeout_s) for scored in asked])
            self._tell_failures(found, step)
            return found
        except TimeoutError:
            if timeout_s is None or all(scored.done() for scored in asked):  # raised by the source itself
                raise
            raise RewardError(
                f"the reward function did not return within {timeout_s:g} s for {count} responses; make it "
                "faster or raise timeout.reward"
            ) from None

    def _tell_failures(self, found: Rewards, step: int) -> None:
        """Tell the user how many responses have no reward of their own, and why. Raises RewardError if none has one."""
        if found.failed is None:
            return
        reasons = [why for why in found.failed.tolist() if why]
        kinds = Counter(why.partition(":")[0] for why in reasons)
        listed = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        said = f"the rewards of {kinds.total()} of {len(found.rewards)} responses failed ({listed})"
        said += f", the first: {reasons[0].splitlines()[0]}"
        said += f"; {self.printed} shows them" if self.printed else ""
        if kinds.total() == len(found.rewards) > 1:
            raise RewardError(said)
        self.note(f"warning: step {step}: {said}")

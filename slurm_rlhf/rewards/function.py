"""Load and call the user's reward function: `reward_func(queries, prompts, labels, **kwargs)` as in OpenRLHF.

It gets what the names in its signature ask for; the signature is read when the file is loaded. What it can take, and an
example: `docs/data_and_reward.md`. Its answer is read into arrays; anything unexpected is an error that says where it
is wrong. Lists, tuples, numpy arrays and tensors of any library are known by their `tolist`.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.config.schema import Reward
from slurm_rlhf.errors import ConfigError, RewardError, cut, meant
from slurm_rlhf.records import F32, Prompt, Trajectory
from slurm_rlhf.user_files import file_of, line_of, note_origin, run_file, same_place, text_of
from slurm_rlhf.wire import timeouts

LARGEST = float(np.finfo(np.float32).max)
KEYS = ("rewards", "scores", "components", "extra_logs")


@dataclass(slots=True)
class Rewards:
    """Hold one entry per response, [N]."""

    rewards: F32
    scores: F32 | None = None  # how good the response is by the task's own measure, e.g. 1 if it is correct
    extra_logs: dict[str, F32] = field(default_factory=dict)  # name -> values to average and log, [N] or [1]
    components: dict[str, F32] = field(default_factory=dict)  # name -> [N], the parts of the reward

    def select(self, rows: slice | NDArray[np.int64]) -> Rewards:
        """Return the entries of the responses `rows`, in that order; a value for all of them is that of each."""

        def chosen(named: dict[str, F32]) -> dict[str, F32]:
            return {name: found[rows] if len(found) == len(self.rewards) else found for name, found in named.items()}

        scores = None if self.scores is None else self.scores[rows]
        return Rewards(self.rewards[rows], scores, chosen(self.extra_logs), chosen(self.components))


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
    return f"{cut(repr(value), 80)} ({type(value).__name__})"


Argument = Callable[[list[Prompt], list[Trajectory], int], Any]

ARGUMENTS: dict[str, Argument] = {
    "queries": lambda prompts, found, step: [p.text + t.text for p, t in zip(prompts, found, strict=True)],
    "prompts": lambda prompts, found, step: [p.text for p in prompts],
    "labels": lambda prompts, found, step: [copy.deepcopy(p.label) for p in prompts],
    "responses": lambda prompts, found, step: [t.text for t in found],
    "rows": lambda prompts, found, step: [copy.deepcopy(p.row) for p in prompts],
    "prompt_ids": lambda prompts, found, step: [t.prompt_ids.tolist() for t in found],
    "response_ids": lambda prompts, found, step: [t.response_ids.tolist() for t in found],
    "finish_reasons": lambda prompts, found, step: [t.finish_reason for t in found],
    "step": lambda prompts, found, step: step,
}
"""Name -> how it is made. All but `step` are lists with one entry per response, and copies: what a function changes in
them changes nothing else. `docs/data_and_reward.md` says what each holds."""

BY_PLACE = ("queries", "prompts", "labels")
"""The order of OpenRLHF, for functions that call their first three parameters otherwise."""

ELSEWHERE = {"completions": "responses", "completion_ids": "response_ids"}
"""Names that TRL uses -> ours. Never taken by place: a completion is not a query."""


@dataclass(frozen=True, slots=True)
class Taken:
    """List the arguments that a function takes."""

    places: tuple[str, ...]
    names: tuple[str, ...]

    def call(
        self, function: Callable[..., Any], prompts: list[Prompt], trajectories: list[Trajectory], step: int
    ) -> Any:
        """Call `function` for `trajectories` and return its answer; `prompts[i]` is the prompt of `trajectories[i]`."""
        return function(
            *(ARGUMENTS[name](prompts, trajectories, step) for name in self.places),
            **{name: ARGUMENTS[name](prompts, trajectories, step) for name in self.names},
        )


def taken(function: Callable[..., Any], where: str) -> Taken:
    """Find the arguments that `function` takes; `**kwargs` takes all that have no parameter of their own.

    Raises RewardError, its message starting with `where`, for a coroutine or a generator, and for a parameter without
    a default that nothing is passed for.
    """
    _refuse_kind(function, where)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin or an extension has none
        return Taken(BY_PLACE, ())
    kinds = inspect.Parameter
    placed = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
    open_places = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    places = _places(placed, open_places)
    rest = placed[len(places) :]
    for parameter in rest + named:
        needed = parameter.default is kinds.empty
        if needed and (parameter.name not in ARGUMENTS or parameter.kind is kinds.POSITIONAL_ONLY):
            raise RewardError(_unknown(parameter.name, where))
    names = [p.name for p in rest + named if p.name in ARGUMENTS and p.kind is not kinds.POSITIONAL_ONLY]
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        names += [name for name in ARGUMENTS if name not in names and name not in places]
    return Taken(places, tuple(names))


def _places(placed: list[inspect.Parameter], open_places: bool) -> tuple[str, ...]:
    """Return the three of OpenRLHF by place, unless the name of a parameter says that it means something else."""
    first = placed[: len(BY_PLACE)]
    if len(first) < len(BY_PLACE) and not open_places:
        return ()
    for name, parameter in zip(BY_PLACE, first, strict=False):
        other = parameter.name in ELSEWHERE or (parameter.name in ARGUMENTS and parameter.name != name)
        setting = parameter.name != name and parameter.default not in (inspect.Parameter.empty, None)
        if other or setting:
            return ()
    return BY_PLACE


def _refuse_kind(function: Callable[..., Any], where: str) -> None:
    for target in (function, getattr(function, "__call__", None)):  # noqa: B004 an object with an async __call__
        if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
            raise RewardError(
                f"{where} is declared with `async def`, and nothing awaits it: declare it with `def`, and run "
                "coroutines inside it with asyncio.run(...)"
            )
        if inspect.isgeneratorfunction(target):
            raise RewardError(f"{where} is a generator (it has a `yield`): return a list with one number per response")


def _unknown(name: str, where: str) -> str:
    hint = f"A column of the data set is in rows: rows[i][{name!r}]"
    if name in ELSEWHERE:
        hint = f"TRL's {name} are `{ELSEWHERE[name]}` here"
    return (
        f"{where} has a parameter {name!r} that nothing is passed for. Passed are {', '.join(ARGUMENTS)}: take any of "
        f"them by name. {hint}"
    )


FUNCTION = "reward_func"
KEY = "reward.remote_url"
REGISTERED = "reward.function"


Function = TypeVar("Function", bound=Callable[..., Any])

_REGISTERED: dict[str, Callable[..., Any]] = {}


def register_reward(function: Function, name: str = "", *, replace: bool = False) -> Function:
    """Make a reward function known by its name, so that `reward.function` can choose it; also a decorator.

    Call it in a Python file that `train.plugins` names. The function takes what `reward_func` in a file takes. `name`:
    the function's own, if empty. Raises ConfigError for a name that is taken, unless `replace` is set.
    """
    if not callable(function):
        raise ConfigError(f"register_reward takes a function, got {type(function).__name__}")
    name = name or getattr(function, "__name__", type(function).__name__)
    owner = _REGISTERED.get(name)
    if owner is not None and not replace and not same_place(owner, function):
        raise ConfigError(f"the reward name {name!r} is taken by {file_of(owner)}: register yours by another name")
    _REGISTERED[name] = function
    note_origin(REGISTERED, name)
    return function


class RewardFunction:
    """Call the user's function and accept only one finite number per response."""

    def __init__(self, function: Callable[..., Any], file: Path | str, arguments: Taken, name: str = FUNCTION) -> None:
        self._function = function
        self._file = file
        self._arguments = arguments
        self._name = name

    @classmethod
    def of(cls, config: Reward) -> RewardFunction:
        """Find the function that `config` names: one that is registered, or that of a file. Raises as `load`."""
        if not config.function:
            return cls.load(config.remote_url)
        name = config.function
        if name not in _REGISTERED:
            known = ", ".join(sorted(_REGISTERED)) or "none"
            raise ConfigError(
                f"reward.function = {name!r} is not registered{meant(name, _REGISTERED)} (registered: {known}): call "
                "slurm_rlhf.register_reward in a file that train.plugins names, or pass it to slurm_rlhf.train"
            )
        function = _REGISTERED[name]
        return cls(
            function, file_of(function), taken(function, f"{_defined(file_of(function), function)}: {name}"), name
        )

    @classmethod
    def load(cls, source: str) -> RewardFunction:
        """Load the function in the Python file `source`, whose directory is importable for it.

        Raises ConfigError when there is no such file or `source` is a URL, RewardError when the file cannot be run
        (with the line), does not define `reward_func`, or its signature takes what is not passed.
        """
        file = Path(source).absolute()
        if not file.is_file():
            raise ConfigError(f"{KEY}: no such file: {source or repr('')}: name a Python file with {FUNCTION}")
        function = getattr(run_file(file, KEY, RewardError), FUNCTION, None)
        if not callable(function):
            raise RewardError(f"{file} does not define {FUNCTION}(queries, prompts, labels, **kwargs): add it")
        return cls(function, file, taken(function, f"{_defined(file, function)}: {FUNCTION}"))

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; `prompts[i]` is the prompt of `trajectories[i]`.

        `step`: the training step that they are of; in an evaluation, the steps done before it. The function gets those
        of `ARGUMENTS` that its signature takes. Raises RewardError for what it raises or answers.
        """
        try:
            answer = self._arguments.call(self._function, prompts, trajectories, step)
        except (Exception, SystemExit) as error:
            at = self._culprit(error, prompts, trajectories, step)
            raise RewardError(f"{line_of(self._file, error)}: {self._name} raised {text_of(error)}{at}") from error
        return parse_answer(answer, len(trajectories), f"{self._file}: {self._name}")

    def _culprit(self, error: BaseException, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> str:
        """Name the first response that raises the same alone; empty: none does within `timeouts.REWARD_SEARCH_S`."""
        until = time.monotonic() + timeouts.REWARD_SEARCH_S
        for prompt, trajectory in zip(prompts, trajectories, strict=True):
            if time.monotonic() > until:
                break
            try:
                self._arguments.call(self._function, [prompt], [trajectory], step)
            except (Exception, SystemExit) as alone:
                if (type(alone), str(alone)) == (type(error), str(error)):
                    return f", for the prompt {cut(prompt.text, 200)!r} and the response {cut(trajectory.text, 200)!r}"
        return ""


def _defined(file: Path | str, function: Callable[..., Any]) -> str:
    """Name file and line of the function, where it is defined in the file."""
    code = getattr(function, "__code__", None)
    return f"{file}:{code.co_firstlineno}" if code is not None and code.co_filename == str(file) else str(file)

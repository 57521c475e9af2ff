"""Pass a reward function what the names in its signature ask for; the signature is read when the file is loaded."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.errors import RewardError
from slurm_rlhf.records import Prompt, Trajectory

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
them changes nothing else. README.md says what each holds."""

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
    except (TypeError, ValueError):  # of a builtin or an extension
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

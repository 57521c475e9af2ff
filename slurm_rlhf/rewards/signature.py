"""Find the arguments that a user's reward function takes, and call it with them, by one of three conventions.

OpenRLHF's: queries, prompts and labels by position. Ours: the names in `ARGUMENTS`. TRL's, if there is a parameter
`completions` or `completion_ids`: keywords, every column of the data is passed by its name, and prompts and completions
are messages if the data has messages. Source: TRL 1.16, `GRPOTrainer`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from slurm_rlhf.errors import RewardError
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.user_files import file_of, functions_in

Argument = Callable[[Sequence[Item], int], Any]

ARGUMENTS: dict[str, Argument] = {
    "queries": lambda items, step: [item["prompt"] + item["response"] for item in items],
    "prompts": lambda items, step: [item["prompt"] for item in items],
    "labels": lambda items, step: [copy.deepcopy(item["label"]) for item in items],
    "responses": lambda items, step: [item["response"] for item in items],
    "rows": lambda items, step: [copy.deepcopy(item["row"]) for item in items],
    "prompt_ids": lambda items, step: [[*item["prompt_ids"]] for item in items],
    "response_ids": lambda items, step: [[*item["response_ids"]] for item in items],
    "finish_reasons": lambda items, step: [item["finish_reason"] for item in items],
    "versions": lambda items, step: [item["version"] for item in items],
    "turns": lambda items, step: [item["turns"] for item in items],
    "dialogues": lambda items, step: [copy.deepcopy(item["dialogue"]) for item in items],
    "step": lambda items, step: step,
}
"""Name -> function that makes the argument. All but `step` are lists with one entry per response, and copies, which a
reward function may change. `docs/rewards.md` describes each."""

BY_PLACE = ("queries", "prompts", "labels")
"""OpenRLHF's order of arguments, for functions whose first three parameters have other names."""


def _completion(item: Item) -> Any:
    """Return the response, or its messages; a list that a tool has returned stays a list, as in TRL."""
    turns = [turn | {"content": turn.get("result", turn["content"])} for turn in copy.deepcopy(item["dialogue"])]
    return item["response"] if item["messages"] is None else turns


OF_TRL: dict[str, Argument] = {
    "prompts": lambda items, step: [copy.deepcopy(item["messages"] or item["prompt"]) for item in items],
    "completions": lambda items, step: [_completion(item) for item in items],
    "completion_ids": lambda items, step: [[*item["response_ids"]] for item in items],
    "trainer_state": lambda items, step: SimpleNamespace(global_step=step),
    "log_extra": lambda items, step: _ignored,
    "log_metric": lambda items, step: _ignored,
}
"""Keyword of TRL -> function that makes the argument; columns of the data are passed as well."""
_MARKS = ("completions", "completion_ids")
ENVIRONMENTS = "environments"
"""Keyword of TRL for the environments of the episodes."""


def _ignored(*given: Any) -> None:
    """Replace TRL's logging functions: here `extra_logs` in the answer are logged."""


@dataclass(frozen=True, slots=True)
class Taken:
    """List the arguments that a function takes."""

    places: tuple[str, ...]  # passed by position
    names: tuple[str, ...]  # passed by name
    trl: bool = False  # names are keywords of TRL and columns of the data
    columns: tuple[str, ...] | None = ()  # columns that it gets, where the data has them; None: all

    def call(self, function: Callable[..., Any], items: Sequence[Item], step: int) -> Any:
        """Call `function` for `items` and return its answer; a coroutine is run to its end. Raises what it raises."""
        if self.trl:
            held = [name for name in items[0]["row"] if name not in OF_TRL] if items else []
            columns = [name for name in held if self.columns is None or name in self.columns]
            named: dict[str, Any] = {name: self._keyword(name, items, step) for name in (*self.names, *columns)}
        else:
            named = {name: ARGUMENTS[name](items, step) for name in self.names}
        answer = function(*(ARGUMENTS[name](items, step) for name in self.places), **named)
        return _awaited(answer) if inspect.isawaitable(answer) else answer

    @staticmethod
    def _keyword(name: str, items: Sequence[Item], step: int) -> Any:
        if name in OF_TRL:
            return OF_TRL[name](items, step)
        if items and not any(name in item["row"] for item in items):
            raise RewardError(
                f"the reward function takes {name!r}, and the data has no such column; it has: "
                f"{', '.join(items[0]['row']) or 'none'}"
            )
        return [copy.deepcopy(item["row"].get(name)) for item in items]


def _awaited(answer: Any) -> Any:
    """Run a coroutine, or whatever can be awaited, to its end."""
    import asyncio  # a third of a worker's start, which few functions need

    async def waiting() -> Any:
        return await answer

    return asyncio.run(waiting())


def taken(function: Callable[..., Any], where: str) -> Taken:
    """Find the arguments that `function` takes; `**kwargs` takes all that have no parameter of their own.

    Raises RewardError, its message starting with `where`, for a parameter without a default that nothing is passed for.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin or an extension has none
        return Taken(BY_PLACE, ())
    parameters = list(signature.parameters.values())
    if "Callable" in str(signature.return_annotation):
        name, given = function.__name__, ", ".join(f"{p.name}=..." for p in parameters if p.default is p.empty)
        module = ".".join([*function.__module__.split(".")[:-1], Path(file_of(function)).stem])
        raise RewardError(
            f"{where} makes a reward function and is not one itself: call it in a file of your own, with the lines "
            f"`from {module} import {name}` and `reward_func = {name}({given})`, and name that file"
        )
    kinds = inspect.Parameter
    if any(p.name == ENVIRONMENTS and p.default is kinds.empty for p in parameters):
        raise RewardError(
            f"{where} takes {ENVIRONMENTS!r}, which live in other processes: move it into the file that env.path "
            "names, where it is called for each episode, or let the environment return the reward by get_reward"
        )
    all_names = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    if any(p.name in _MARKS for p in parameters):
        plain = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        names = [p.name for p in plain if p.default is kinds.empty or p.name in OF_TRL]
        names += [name for name in OF_TRL if all_names and name not in names]
        return Taken((), tuple(names), True, None if all_names else tuple(p.name for p in plain))
    placed = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
    places = _places(placed, any(p.kind is kinds.VAR_POSITIONAL for p in parameters))
    rest = placed[len(places) :]
    for parameter in rest + named:
        needed = parameter.default is kinds.empty
        if needed and (parameter.name not in ARGUMENTS or parameter.kind is kinds.POSITIONAL_ONLY):
            raise RewardError(
                f"{where} has a parameter {parameter.name!r} that nothing is passed for. Passed are "
                f"{', '.join(ARGUMENTS)}: take any of them by name. A column of the data set is in rows: "
                f"rows[i][{parameter.name!r}]"
            )
    names = [p.name for p in rest + named if p.name in ARGUMENTS and p.kind is not kinds.POSITIONAL_ONLY]
    if all_names:
        names += [name for name in ARGUMENTS if name not in names and name not in places]
    return Taken(places, tuple(names))


def of_trl(module: ModuleType) -> list[str]:
    """Name the public functions that a file itself defines as rewards for TRL."""
    functions = [(name, getattr(module, name)) for name in functions_in(module)]
    return [name for name, one in functions if not inspect.signature(one).parameters.keys().isdisjoint(_MARKS)]


def _places(placed: list[inspect.Parameter], open_places: bool) -> tuple[str, ...]:
    """Return OpenRLHF's three arguments, unless the name of a parameter shows that it means something else."""
    first = placed[: len(BY_PLACE)]
    if len(first) < len(BY_PLACE) and not open_places:
        return ()
    for name, parameter in zip(BY_PLACE, first, strict=False):
        other = parameter.name in ARGUMENTS and parameter.name != name
        setting = parameter.name != name and parameter.default not in (inspect.Parameter.empty, None)
        if other or setting:
            return ()
    return BY_PLACE

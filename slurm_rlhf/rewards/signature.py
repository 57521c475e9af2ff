"""Find what a user's reward function takes, and call it so: OpenRLHF's three by place, our names, or TRL's keywords.

TRL's convention is known by a parameter `completions` or `completion_ids`: then every column of the data is passed by
its name, and prompts and completions are messages where the data has messages. Source: TRL 1.16, `GRPOTrainer`.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypedDict

from slurm_rlhf.errors import RewardError

if TYPE_CHECKING:
    from slurm_rlhf.records import Prompt, Trajectory


class Item(TypedDict):
    """Describes a response, with the prompt that it answers."""

    prompt: str  # as the model got it, template included
    messages: list[dict[str, Any]] | None  # None: the prompt is a plain text, without an environment
    response: str
    dialogue: list[dict[str, Any]]  # messages behind the prompt, those of the policy as `assistant`
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
            prompt=prompt.text,
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
    """Make the dialogue of one answer."""
    return [{"role": "assistant", "content": text}]


def last_turn(item: Item) -> str:
    """Return what the policy wrote last; without an environment the response."""
    return str(item["dialogue"][-1]["content"])


def _messages(prompt: Prompt, found: Trajectory, given: Any) -> list[dict[str, Any]] | None:
    if isinstance(given, list):
        return given
    return [{"role": "user", "content": prompt.text if given is None else str(given)}] if found.dialogue else None


def by_prompt(prompts: Sequence[Prompt]) -> list[list[int]]:
    """List the places of the responses to each prompt; those to one prompt stand together."""
    groups: list[list[int]] = []
    for place, prompt in enumerate(prompts):
        if not place or prompt is not prompts[place - 1]:
            groups.append([])
        groups[-1].append(place)
    return groups


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
"""Name -> how it is made. All but `step` are lists with one entry per response, and copies: what a function changes in
them changes nothing else. `docs/rewards.md` says what each holds."""

BY_PLACE = ("queries", "prompts", "labels")
"""The order of OpenRLHF, for functions that call their first three parameters otherwise."""


def _completion(item: Item) -> Any:
    return item["response"] if item["messages"] is None else copy.deepcopy(item["dialogue"])


OF_TRL: dict[str, Argument] = {
    "prompts": lambda items, step: [copy.deepcopy(item["messages"] or item["prompt"]) for item in items],
    "completions": lambda items, step: [_completion(item) for item in items],
    "completion_ids": lambda items, step: [[*item["response_ids"]] for item in items],
    "trainer_state": lambda items, step: SimpleNamespace(global_step=step),
    "log_extra": lambda items, step: _ignored,
    "log_metric": lambda items, step: _ignored,
}
"""Keyword of TRL -> how it is made; columns of the data come with them."""
_MARKS = ("completions", "completion_ids")
ENVIRONMENTS = "environments"
"""Keyword of TRL for the objects that have played the episodes."""


def _ignored(*given: Any) -> None:
    """Stand for TRL's functions that log: what a function answers is logged here."""


@dataclass(frozen=True, slots=True)
class Taken:
    """List the arguments that a function takes."""

    places: tuple[str, ...]
    names: tuple[str, ...]
    trl: bool = False  # names are keywords of TRL and columns of the data
    columns: tuple[str, ...] | None = ()  # columns that it gets, where the data has them; None: all

    def call(self, function: Callable[..., Any], items: Sequence[Item], step: int) -> Any:
        """Call `function` for `items` and return its answer; a coroutine is run to its end. Raises what it raises."""
        named: dict[str, Any]
        if self.trl:
            held = [name for name in items[0]["row"] if name not in OF_TRL] if items else []
            columns = [name for name in held if self.columns is None or name in self.columns]
            named = {name: self._keyword(name, items, step) for name in (*self.names, *columns)}
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
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin or an extension has none
        return Taken(BY_PLACE, ())
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
    functions = [one for one in vars(module).values() if inspect.isfunction(one) and one.__module__ == module.__name__]
    public = [one for one in functions if not one.__name__.startswith("_")]
    return [one.__name__ for one in public if not inspect.signature(one).parameters.keys().isdisjoint(_MARKS)]


def _places(placed: list[inspect.Parameter], open_places: bool) -> tuple[str, ...]:
    """Return the three of OpenRLHF by place, unless the name of a parameter says that it means something else."""
    first = placed[: len(BY_PLACE)]
    if len(first) < len(BY_PLACE) and not open_places:
        return ()
    for name, parameter in zip(BY_PLACE, first, strict=False):
        other = parameter.name in ARGUMENTS and parameter.name != name
        setting = parameter.name != name and parameter.default not in (inspect.Parameter.empty, None)
        if other or setting:
            return ()
    return BY_PLACE

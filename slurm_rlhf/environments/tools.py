"""Makes tools of the public methods of a class: their schemas, their arguments, and what they answer."""

from __future__ import annotations

import inspect
import json
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import msgspec

from slurm_rlhf.environments import _transformers
from slurm_rlhf.environments.records import ARGUMENTS, CALLS, RAISED, UNKNOWN, UNREADABLE, Messages, ToolCall
from slurm_rlhf.errors import EpisodeError, cut, meant
from slurm_rlhf.user_files import text_of

NOT_TOOLS = ("reset", "get_reward", "close")
LONGEST = 100_000
"""Characters of what a tool answers: more fits into no context."""


def tools_of(made: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class that are tools, by name."""
    found = inspect.getmembers(made, inspect.isfunction)
    return {name: method for name, method in found if not name.startswith("_") and name not in NOT_TOOLS}


def schemas_of(made: type, file: str) -> list[dict[str, Any]]:
    """Describe the tools of a class as chat templates take them. Raises EpisodeError for one that lacks type hints."""
    found = []
    for name, method in tools_of(made).items():
        where = f"{file}:{method.__code__.co_firstlineno}: the tool {made.__name__}.{name}"
        try:
            found.append(_transformers.json_schema(MethodType(method, object())))
            arguments_of(method)
        except (ValueError, TypeError, NameError) as error:
            raise EpisodeError(
                f"{where} cannot be described to the policy: {error}. Give each parameter a type hint and a line in "
                "the docstring (`Args:` and `name: what it is`), or begin the name of a method that is no tool with _"
            ) from None
    return found


def arguments_of(method: Callable[..., Any]) -> type[msgspec.Struct]:
    """Make the record of a tool's arguments, which knows their types. Raises TypeError, NameError."""
    hints = typing.get_type_hints(method)
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"{parameter} takes any arguments")
        one = (parameter.name, hints[parameter.name])
        fields.append(one if parameter.default is parameter.empty else (*one, parameter.default))
    made = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    msgspec.json.schema(made)  # a type that cannot be read is found here
    return made


def answer_calls(
    instance: Any, calls: Sequence[ToolCall], value: Callable[[Any], Any]
) -> tuple[Messages, dict[str, int]]:
    """Call the tools of an instance; return a message for each call, and counts of calls and of errors by kind.

    `value` awaits what a tool returns, if it is a coroutine.
    """
    tools, messages, counts = tools_of(type(instance)), Messages(), Counter[str]()
    for call in calls:
        counts[CALLS] += 1
        kind, answer = _answer(instance, tools, call, value)
        if kind:
            counts[kind] += 1
        messages.append({"role": "tool", "name": call.name, "content": cut(answer, LONGEST)})
    return messages, dict(counts)


def _answer(
    instance: Any, tools: dict[str, Callable[..., Any]], call: ToolCall, value: Callable[[Any], Any]
) -> tuple[str, str]:
    """Return the kind of an error (empty: none) and the text for the policy."""
    if call.error:
        return UNREADABLE, f"error: {call.error}"
    if call.name not in tools:
        return UNKNOWN, f"error: there is no tool {call.name!r}{meant(call.name, tools)}; there are {', '.join(tools)}"
    arguments = arguments_of(tools[call.name])
    try:
        given = msgspec.convert(call.arguments, arguments)
    except msgspec.ValidationError as error:
        return ARGUMENTS, f"error: arguments of {call.name}: {error}"
    try:
        found = value(
            getattr(instance, call.name)(**{name: getattr(given, name) for name in arguments.__struct_fields__})
        )
    except Exception as error:
        return RAISED, f"error: {text_of(error)}"
    return "", found if isinstance(found, str) else json.dumps(found, default=str, ensure_ascii=False)

"""Calls a user's class, each of whose instances plays an episode, and makes tools of its public methods."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec

from slurm_rlhf.environments import _transformers, records
from slurm_rlhf.environments.records import Answer, Messages, Start, ToolCall
from slurm_rlhf.errors import EpisodeError, cut, meant
from slurm_rlhf.user_files import line_of, text_of


class UserClass:
    """Calls the methods of a user's instance, and names file and line of what they raise."""

    def __init__(self, made: Any, file: Path) -> None:
        self.made, self.file, self.loop = made, file, asyncio.new_event_loop()
        self.used = _USED[made].pop() if _USED.get(made) else None
        self.instance: Any = made.__new__(made) if self.used is None else self.used

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method. Raises EpisodeError."""
        return self.run(f"{self.made.__name__}.{name}", lambda: getattr(self.instance, name)(*arguments, **named))

    def run(self, what: str, work: Callable[[], Any]) -> Any:
        """Call `work`, which runs the user's code. Raises EpisodeError."""
        try:
            return self.value(work())
        except (Exception, SystemExit) as error:
            raise EpisodeError(f"{line_of(self.file, error)}: {what} raised {text_of(error)}") from error

    def value(self, found: Any) -> Any:
        """Return `found`, or what it returns if it is a coroutine."""
        return self.loop.run_until_complete(found) if inspect.isawaitable(found) else found

    def wrong(self, name: str, answer: Any, expected: str) -> EpisodeError:
        """Make the error for an answer that no episode can go on with."""
        shown = f"returned {cut(repr(answer), 80)}; expected {expected}"
        return EpisodeError(f"{self.file}: {self.made.__name__}.{name} {shown}")

    def number(self, name: str, answer: Any) -> float:
        """Read a reward: a finite number, or anything that `float` takes, as a tensor of one element."""
        try:
            if not isinstance(answer, str) and math.isfinite(found := float(answer)):
                return found
        except (TypeError, ValueError):
            pass
        raise self.wrong(name, answer, "a finite number as reward")

    def messages(self, name: str, given: Any) -> Messages:
        """Read messages; a text is one of the user."""
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        if isinstance(given, list) and given and all(isinstance(one, dict) and "role" in one for one in given):
            return [dict(one) for one in given]
        raise self.wrong(name, given, "a string or a list of messages")

    def reset(self, start: Start) -> Any:
        """Call `reset` with the row as `row`, or with those of its columns that it names."""
        if self.used is None:
            self.call("__init__")  # by `call`: OpenRLHF allows a coroutine
        if "row" in inspect.signature(self.instance.reset).parameters:
            return self.call("reset", copy.deepcopy(start.row))
        return self.call("reset", **columns_of(self.instance.reset, start.row))

    def scored(self, name: str, answer: Mapping[str, Any], reward: float) -> Answer:
        """Answer with a reward, and with `scores` and `extra_logs` of a dict of OpenRLHF."""
        score, logs = answer.get("scores"), answer.get("extra_logs") or {}
        return Answer(
            reward=reward,
            score=None if score is None else self.number(name, score),
            logs={str(one): self.number(name, value) for one, value in logs.items()},
        )

    def end(self) -> Answer:
        """End the episode, over or not. Raises EpisodeError."""
        self.close()
        if self.made in _USED and not hasattr(self.instance, "close"):
            _USED[self.made].append(self.instance)
        return Answer()

    def close(self) -> None:
        """Let the environment free what it holds, if it has `close`."""
        if hasattr(self.instance, "close"):
            self.call("close")
        self.loop.close()

    def leave(self) -> None:
        """Forget the episode; one that was lost or given up has not been closed yet."""
        if not self.loop.is_closed():
            with suppress(EpisodeError):
                self.close()
        self.loop.close()


_USED: dict[type, list[Any]] = {}
"""Class of a script -> instances that play no episode now. TRL resets them for the next one, and those of its scripts
never close their connections."""


def reuse(made: type) -> None:
    """Let instances without `close` play one episode after the other."""
    _USED.setdefault(made, [])


def columns_of(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the columns of a row that a function names; all of them where it takes any."""
    parameters = inspect.signature(function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: copy.deepcopy(value) for name, value in row.items() if every or name in parameters}


NOT_TOOLS = ("reset", "get_reward", "close")
LONGEST = 100_000
"""Most characters of a tool's answer; a longer one would fit into no context."""


def tools_of(made: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class that are tools, by name; all but static ones are bound: without `self`."""
    found = inspect.getmembers(made, inspect.isfunction)
    static = [name for name, _ in found if isinstance(inspect.getattr_static(made, name), staticmethod)]
    bound = {name: method if name in static else MethodType(method, made) for name, method in found}
    return {name: method for name, method in bound.items() if not name.startswith("_") and name not in NOT_TOOLS}


def schemas_of(made: type, file: str) -> list[dict[str, Any]]:
    """Describe the tools of a class as chat templates take them. Raises EpisodeError for one that lacks type hints."""
    found = []
    for name, method in tools_of(made).items():
        where = f"{file}:{method.__code__.co_firstlineno}: the tool {made.__name__}.{name}"
        try:
            found.append(_transformers.json_schema(method))
            arguments_of(method)
        except (ValueError, TypeError, NameError) as error:
            why = str(error).splitlines()[-1]
            raise EpisodeError(
                f"{where} cannot be described to the policy: {why}. Give each parameter a type hint and a line in "
                "the docstring (`Args:` and `name: what it is`), or begin the name of a method that is no tool with _"
            ) from None
    return found


def arguments_of(method: Callable[..., Any]) -> type[msgspec.Struct]:
    """Make the record of a tool's arguments, which knows their types. Raises TypeError, NameError."""
    hints = typing.get_type_hints(method)
    fields: list[Any] = []
    for parameter in inspect.signature(method).parameters.values():
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
        counts[records.CALLS] += 1
        kind, text, found = _answer(instance, tools, call, value)
        if kind:
            counts[kind] += 1
        messages.append({"role": "tool", "name": call.name, "content": cut(text, LONGEST)})
        if isinstance(found, list) and len(text) <= LONGEST:
            messages[-1]["result"] = json.loads(text)
    return messages, dict(counts)


def _answer(
    instance: Any, tools: dict[str, Callable[..., Any]], call: ToolCall, value: Callable[[Any], Any]
) -> tuple[str, str, Any]:
    """Return the kind of an error (empty: none), its text or that of what the tool has returned, and the latter."""
    if call.error:
        return records.UNREADABLE, f"error: {call.error}", None
    if call.name not in tools:
        known = f"{meant(call.name, tools)}; there are {', '.join(tools)}"
        return records.UNKNOWN, f"error: there is no tool {call.name!r}{known}", None
    arguments = arguments_of(tools[call.name])
    try:
        given = msgspec.convert(call.arguments, arguments)
    except msgspec.ValidationError as error:
        return records.ARGUMENTS, f"error: arguments of {call.name}: {error}", None
    named = {name: getattr(given, name) for name in arguments.__struct_fields__}
    try:
        found = value(getattr(instance, call.name)(**named))
        text = found if isinstance(found, str) else json.dumps(found, default=str, ensure_ascii=False)
        text = text.encode("utf-8", "replace").decode()  # no tokenizer reads a lone surrogate
    except (Exception, SystemExit) as error:
        return records.RAISED, f"error: {text_of(error)}", None
    return "", text, found

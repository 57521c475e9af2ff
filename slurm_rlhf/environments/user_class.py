"""Calls a user's class, of whose instances each plays an episode, and makes tools of its public methods.

A class of OpenRLHF's agent file may have `execute`, which asks the engine itself: each of its asks is a turn. It is a
coroutine on a loop that runs only while the episode waits for it: until it asks, or returns.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from slurm_rlhf.environments import _transformers
from slurm_rlhf.environments._transformers import hf_tokenizer
from slurm_rlhf.environments.records import (
    ARGUMENTS,
    CALLS,
    RAISED,
    UNKNOWN,
    UNREADABLE,
    Answer,
    Begun,
    Messages,
    Start,
    ToolCall,
    Turn,
)
from slurm_rlhf.errors import EpisodeError, cut, meant
from slurm_rlhf.user_files import line_of, text_of


class UserClass:
    """Calls the methods of a user's instance, and names file and line of what they raise."""

    def __init__(self, made: Any, file: Path) -> None:
        self.made, self.file, self.loop = made, file, asyncio.new_event_loop()
        self.instance: Any = made.__new__(made)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method. Raises EpisodeError."""
        return self.run(f"{self.made.__name__}.{name}", lambda: getattr(self.instance, name)(*arguments, **named))

    def run(self, what: str, work: Callable[[], Any]) -> Any:
        """Do what runs the user's code. Raises EpisodeError."""
        try:
            return self.value(work())
        except (Exception, SystemExit) as error:
            raise EpisodeError(f"{line_of(self.file, error)}: {what} raised {text_of(error)}") from error

    def value(self, found: Any) -> Any:
        """Wait for a coroutine."""
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
        self.call("__init__")  # which OpenRLHF allows to be a coroutine
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
        """End the episode, over or not: let the environment free what it holds, if it has `close`."""
        if hasattr(self.instance, "close"):
            self.call("close")
        self.loop.close()
        return Answer()

    def leave(self) -> None:
        """Forget the episode, over or not."""
        self.loop.close()


def columns_of(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the columns of a row that a function names; all of them where it takes any."""
    parameters = inspect.signature(function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: copy.deepcopy(value) for name, value in row.items() if every or name in parameters}


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


EXECUTOR = "executor"
"""Name of the convention."""
_CUT_OFF = "length"


class Ask(NamedTuple):
    """Holds what `execute` asks of the engine, and waits for the tokens."""

    ids: list[int]
    sampling: Any  # an object with the fields of vLLM's SamplingParams
    answer: Future[Any]


class LlmEngine:
    """Stands for the engine that `execute` gets; a server in a thread of the agent's may ask it, too."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.asks: asyncio.Queue[Ask | None] = asyncio.Queue()
        """Asks of the episode; None: `execute` has ended."""

    async def generate(self, prompt_token_ids: Any, sampling_params: Any = None, multi_modal_data: Any = None) -> Any:
        """Wait for a turn of the policy behind `prompt_token_ids`; return it as vLLM's RequestOutput has it."""
        if multi_modal_data:
            raise EpisodeError("multi_modal_data: models see no images here")
        if (limit := getattr(sampling_params, "max_tokens", None)) is not None and limit < 1:
            raise EpisodeError(f"max_tokens = {limit}: ask for one token at least")
        ask = Ask([int(token) for token in prompt_token_ids], sampling_params, Future())
        self._loop.call_soon_threadsafe(self.asks.put_nowait, ask)
        return await asyncio.wrap_future(ask.answer)


class ExecutorEnvironment(UserClass):
    """Plays one episode after the other with an executor, which may keep a server from one to the next."""

    def __init__(self, made: type, file: Path) -> None:
        super().__init__(made, file)
        self.call("__init__")
        self._name = f"{made.__name__}.execute"
        self._engine = LlmEngine(self.loop)
        self._task: asyncio.Task[Any] | None = None
        self._ask: Ask | None = None

    def begin(self, start: Start) -> Begun:
        self._sampling = start.sampling
        self._ids: list[int] = []  # tokens so far: what `execute` has asked behind, and what was sampled
        self._ranges: list[tuple[int, int]] = []  # first and end of each answer in `_ids`
        asks: asyncio.Queue[Ask | None] = asyncio.Queue()
        self._engine.asks = asks
        given: dict[str, Any] = {
            "prompt": start.text,
            "label": start.label,
            "sampling_params": SimpleNamespace(**start.sampling, logprobs=None),
            "max_length": start.max_len,
            "hf_tokenizer": self.run(f"reading the tokenizer of {start.model}", lambda: hf_tokenizer(start.model)),
            "llm_engine": self._engine,
        }
        if "images" in inspect.signature(self.instance.execute).parameters:
            given["images"] = None
        self._task = self.loop.create_task(self._execute(given))
        self._task.add_done_callback(lambda task: asks.put_nowait(None))
        answer = self._next()
        if answer.done:
            raise EpisodeError(f"{self.file}: {self._name} has not asked llm_engine.generate for any token")
        return Begun(ids=answer.ids, limit=answer.limit)

    def turn(self, turn: Turn) -> Answer:
        return self._sampled(turn.ids, turn.text, turn.finish_reason)

    def end(self) -> Answer:
        if self._task is None or self._task.done():
            return Answer()
        answer = self._sampled([], "", _CUT_OFF)  # no turn is left; `execute` may still say what it was worth
        if not answer.done:
            raise EpisodeError(
                f"{self.file}: {self._name} asks for more behind an answer of no tokens (finish_reason {_CUT_OFF}), "
                "which ends an episode at env.max_turns, env.max_seconds or data.max_len: have it return there"
            )
        return answer

    def leave(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            if self._ask is not None:
                self._ask.answer.cancel()
            with suppress(Exception, asyncio.CancelledError):
                self.loop.run_until_complete(self._task)
        _IDLE[self.made].append(self)

    async def _execute(self, given: dict[str, Any]) -> Any:
        return await self.instance.execute(**given)

    def _sampled(self, ids: list[int], text: str, reason: str) -> Answer:
        assert self._ask is not None
        output = SimpleNamespace(index=0, token_ids=list(ids), text=text, finish_reason=reason, logprobs=None)
        request = SimpleNamespace(prompt_token_ids=list(self._ids), outputs=[output], finished=True)
        self._ranges += [(len(self._ids), len(self._ids) + len(ids))] if ids else []
        self._ids += ids
        self._ask.answer.set_result(request)
        return self._next()

    def _next(self) -> Answer:
        """Let `execute` go on to its next ask, or to its end."""
        assert self._task is not None
        self._ask = self.run(self._name, self._engine.asks.get)
        if self._ask is None or self._task.done():
            return self._ended(self.run(self._name, self._task.result))
        ids, before, sampling = self._ask.ids, self._ids, self._ask.sampling
        if ids[: len(before)] != before:
            raise EpisodeError(
                f"{self.file}: {self._name} asks the engine to go on behind {len(ids)} tokens that do not begin with "
                f"the {len(before)} so far: an episode is one sequence, so ask again when the answer is there, and "
                "behind its token_ids as they are, never encoded again"
            )
        for name, own in self._sampling.items():
            if name in ("temperature", "top_p") and getattr(sampling, name, own) != own:
                raise EpisodeError(
                    f"{self.file}: {self._name} asks for {name} = {getattr(sampling, name)}; the run samples with "
                    f"rollout.{name} = {own} in every turn: use sampling_params as they are, or set the key"
                )
        self._ids = list(ids)
        return Answer(ids=ids[len(before) :], limit=getattr(sampling, "max_tokens", None))

    def _ended(self, found: Any) -> Answer:
        try:
            ids = [int(token) for token in found["observation_tokens"]]
            ranges = [(int(first), int(end)) for first, end in found["action_ranges"] if first < end]
        except (KeyError, TypeError, ValueError):
            raise self.wrong("execute", found, "a dict with observation_tokens and action_ranges") from None
        if ids[: len(self._ids)] != self._ids or ranges != self._ranges:
            raise EpisodeError(
                f"{self.file}: {self._name} returned observation_tokens or action_ranges ({ranges}) that are not those "
                f"of its asks and their answers ({len(self._ids)} tokens, sampled at {self._ranges})"
            )
        reward = found.get("reward")
        answer = self.scored("execute", found, 0.0 if reward is None else self.number("execute", reward))
        answer.done = True
        return answer


_IDLE: defaultdict[type, list[ExecutorEnvironment]] = defaultdict(list)


def executor_of(made: type, file: Path) -> ExecutorEnvironment:
    """Return an executor that plays no episode now, or make one."""
    return _IDLE[made].pop() if _IDLE[made] else ExecutorEnvironment(made, file)

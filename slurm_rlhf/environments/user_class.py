"""Calls what a user has written: a class of whose instances each plays an episode."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_rlhf.environments.records import Answer, Messages, Start
from slurm_rlhf.errors import EpisodeError, cut
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

    def close(self) -> None:
        """Let the environment free what it holds, if it has `close`."""
        if hasattr(self.instance, "close"):
            self.call("close")
        self.loop.close()

    def leave(self) -> None:
        """Forget the episode, over or not."""
        self.loop.close()


def columns_of(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the columns of a row that a function names; all of them where it takes any."""
    parameters = inspect.signature(function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: copy.deepcopy(value) for name, value in row.items() if every or name in parameters}

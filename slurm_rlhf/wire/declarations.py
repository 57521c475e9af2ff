"""Declare a method as a call: the decorator `call`, and what it knows of the method's argument and result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import RunError
from slurm_rlhf.wire.codec import Buffer, decode

F = TypeVar("F", bound=Callable[..., Any])

_DEADLINE = "__deadline__"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """Holds the declaration of a call."""

    name: str
    deadline: str | None  # a field of config.schema_jobs.Timeout; None: it has no answer
    argument: Any  # its record; None: it takes no argument
    result: Any

    def seconds(self, timeout: Timeout) -> float:
        """Return how long the call may take. Raises RunError for a call without an answer."""
        if self.deadline is None:
            raise RunError(f"{self.name} has no answer to wait for")
        limit: float = getattr(timeout, self.deadline)
        return limit

    def read_result(self, frames: Sequence[Buffer]) -> Any:
        """Decode the result. Raises WireError."""
        return decode(frames, self.result, f"the result of {self.name}")


def call(*, deadline: str | None) -> Callable[[F], F]:
    """Declare a method as a call that may take `deadline`, a field of `config.schema_jobs.Timeout`.

    None: the call has no answer, and nobody waits for it.
    """
    known = [field.name for field in fields(Timeout)]
    if deadline is not None and deadline not in known:
        raise TypeError(f"{deadline!r} is no deadline; the fields of Timeout: {', '.join(known)}")

    def declare(method: F) -> F:
        setattr(method, _DEADLINE, deadline)
        method.__isabstractmethod__ = True  # type: ignore[attr-defined]
        return method

    return declare


@cache
def spec_of(method: Callable[..., Any]) -> CallSpec:
    """Return the declaration of a method. Raises RunError for a function that `call` has not declared."""
    if not hasattr(method, _DEADLINE):
        raise RunError(f"{getattr(method, '__qualname__', method)} is not declared as a call; see wire/calls.py")
    hints = get_type_hints(method)
    result = hints["return"]
    if get_origin(result) is Future:
        (result,) = get_args(result)
    parameters = list(inspect.signature(method).parameters)[1:]
    if len(parameters) > 1:
        raise RunError(f"{method.__qualname__} has {len(parameters)} arguments; a call has one at most, a record")
    argument = hints[parameters[0]] if parameters else None
    return CallSpec(method.__name__, getattr(method, _DEADLINE), argument, result)


@cache
def calls_of(role: type[Any]) -> dict[str, CallSpec]:
    """Map the names of all calls of a class and of its bases to their declarations."""
    declared: dict[str, Any] = {}
    for base in role.__mro__:
        for name, member in vars(base).items():
            if hasattr(member, _DEADLINE):
                declared.setdefault(name, member)
    return {name: spec_of(member) for name, member in declared.items()}

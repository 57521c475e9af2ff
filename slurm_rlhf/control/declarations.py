"""Declares calls, and makes the records, lists and arrays that they declare of what the codec has decoded.

A call is a method with the decorator `call`, whose argument is a record. A dataclass travels as the map of its fields,
a named tuple as the list of its values. Everything but the declared type is refused with a WireError that names the
record and the field. Nothing is converted silently, except an int where a float is declared.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from slurm_rlhf.config.schema_cluster import Timeout
from slurm_rlhf.errors import RunError, WireError

F = TypeVar("F", bound=Callable[..., Any])

_DEADLINE = "__deadline__"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """Holds the declaration of a call."""

    name: str
    deadline: str | None  # a field of config.schema_cluster.Timeout; None: it has no answer
    argument: Any  # its record; None: it takes no argument
    result: Any

    def seconds(self, timeout: Timeout) -> float:
        """Return how long the call may take. Raises RunError for a call without an answer."""
        if self.deadline is None:
            raise RunError(f"{self.name} has no answer to wait for")
        limit: float = getattr(timeout, self.deadline)
        return limit

    def read_argument(self, fields: dict[str, Any]) -> Any:
        """Make the argument from the map of its fields. Raises WireError."""
        return read(self.argument, fields, f"the argument of {self.name}")

    def read_result(self, value: Any) -> Any:
        """Make the result from what has arrived. Raises WireError."""
        return read(self.result, value, f"the result of {self.name}")


def call(*, deadline: str | None) -> Callable[[F], F]:
    """Declare a method as a call that may take `deadline`, a field of `config.schema_cluster.Timeout`.

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
        raise RunError(f"{getattr(method, '__qualname__', method)} is not declared as a call; see control/calls.py")
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


Reader = Callable[[Any], Any]

_PLAIN = (bool, int, str, bytes)


class _Mismatch(Exception):
    """Says that a value is not of the declared type; `path` leads to it from the outermost value."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path = ""

    def below(self, step: str) -> _Mismatch:
        self.path = step + self.path
        return self


def read(declared: Any, value: Any, name: str) -> Any:
    """Read `value` as the type `declared`; `name` is its name in error messages. Raises WireError."""
    try:
        return reader(declared)(value)
    except _Mismatch as error:
        raise WireError(f"{name}{error.path} {error}") from None


@cache
def reader(declared: Any) -> Reader:
    """Make the function that reads values of a type. Raises TypeError for a type that cannot travel."""
    if declared in _SIMPLE:
        return _SIMPLE[declared]
    origin = get_origin(declared)
    if origin in _GENERIC:
        return _GENERIC[origin](*get_args(declared))
    if isinstance(declared, type) and dataclasses.is_dataclass(declared):
        return _record(declared)
    if isinstance(declared, type) and issubclass(declared, tuple) and hasattr(declared, "_fields"):
        return _named_tuple(declared)
    raise TypeError(f"{declared} cannot travel between processes; use dataclasses, lists, dicts, arrays and numbers")


def _described(value: Any) -> str:
    """Describe a value that was refused by its type and its first characters."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return f"{str(value)[:40]!r} ({type(value).__name__})"


def _none(value: Any) -> None:
    if value is not None:
        raise _Mismatch(f"must be None, and is {_described(value)}")


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _Mismatch(f"must be a float, and is {_described(value)}")


def _plain(kind: type) -> Reader:
    def read_plain(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"must be of type {kind.__name__}, and is {_described(value)}")
        return value

    return read_plain


def _literal(*allowed: Any) -> Reader:
    def read_literal(value: Any) -> Any:
        if not any(type(value) is type(known) and value == known for known in allowed):
            raise _Mismatch(f"must be one of {', '.join(map(repr, allowed))}, and is {_described(value)}")
        return value

    return read_literal


def _optional(*kinds: Any) -> Reader:
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) != 1 or len(kinds) != 2:
        raise TypeError(f"a union of {kinds} cannot travel between processes; one type or None can")
    read_other = reader(others[0])
    return lambda value: None if value is None else read_other(value)


def _list(kind: Any) -> Reader:
    read_item = reader(kind)

    def read_list(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _Mismatch(f"must be a list, and is {_described(value)}")
        if kind in _PLAIN and set(map(type, value)) <= {kind}:
            return value  # without a step of the interpreter for each item
        items = []
        for item in value:
            try:
                items.append(read_item(item))
            except _Mismatch as error:
                raise error.below(f"[{len(items)}]") from None
        return items

    return read_list


def _dict(key_kind: Any, kind: Any) -> Reader:
    read_key, read_item = reader(key_kind), reader(kind)

    def read_dict(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _Mismatch(f"must be a dict, and is {_described(value)}")
        items = {}
        for key, item in value.items():
            try:
                items[read_key(key)] = read_item(item)
            except _Mismatch as error:
                raise error.below(f"[{key!r}]") from None
        return items

    return read_dict


def _array(shape: Any, dtype: Any) -> Reader:
    (scalar,) = get_args(dtype)
    wanted = None if scalar is Any else np.dtype(scalar)

    def read_array(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or (wanted is not None and value.dtype != wanted):
            raise _Mismatch(f"must be an array{f' of {wanted}' if wanted else ''}, and is {_described(value)}")
        return value

    return read_array


def _record(record: type[Any]) -> Reader:
    hints = get_type_hints(record)
    fields = {field.name: reader(hints[field.name]) for field in dataclasses.fields(record)}

    def read_record(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch(f"must be a {record.__name__}, and is {_described(value)}")
        if value.keys() != fields.keys():
            _refuse_fields(record, set(fields), set(value))
        values = {}
        for name, item in value.items():
            try:
                values[name] = fields[name](item)
            except _Mismatch as error:
                raise error.below(f".{name}") from None
        return record(**values)

    return read_record


def _refuse_fields(record: type[Any], known: set[str], found: set[Any]) -> None:
    wrong = [f"{name} is missing" for name in sorted(known - found)]
    wrong += [f"{name} is unknown" for name in sorted(map(str, found - known))]
    raise _Mismatch(f"is no {record.__name__}: {', '.join(wrong)}; its fields: {', '.join(sorted(known))}")


def _named_tuple(record: Any) -> Reader:
    hints = get_type_hints(record)
    fields = [(name, reader(hints[name])) for name in record._fields]

    def read_named_tuple(value: Any) -> Any:
        if type(value) is not list or len(value) != len(fields):
            raise _Mismatch(f"must be a {record.__name__} of {len(fields)} values, and is {_described(value)}")
        values = []
        for (name, read_field), item in zip(fields, value, strict=True):
            try:
                values.append(read_field(item))
            except _Mismatch as error:
                raise error.below(f".{name}") from None
        return record(*values)

    return read_named_tuple


_SIMPLE: dict[Any, Reader] = {
    Any: lambda value: value,
    None: _none,
    type(None): _none,
    float: _float,
    **{kind: _plain(kind) for kind in _PLAIN},
}
_GENERIC: dict[Any, Callable[..., Reader]] = {
    Literal: _literal,
    Union: _optional,
    types.UnionType: _optional,
    list: _list,
    dict: _dict,
    np.ndarray: _array,
}

"""Signatures of the installed libraries' functions, read from the libraries themselves, to compare stand-ins with.

Sources: `inspect` for Python functions, the docstrings that pybind11 writes into its bindings, and .pyi stubs (parsed)
for what a CPU build of torch lacks.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Kind = inspect.Parameter


class Mismatch(AssertionError):
    """A stand-in accepts or offers what the real thing does not."""


def check_signature(real: Any, fake: Any, name: str = "") -> None:
    """Raise Mismatch where `fake` accepts a call that `real` refuses, or offers a name that `real` lacks.

    Both are functions, or both are classes: then every public method, property and attribute that `fake` itself
    defines is compared, and its constructor. `fake` may leave out parameters that have defaults: a call that uses them
    fails then, and says so. It may not hide behind `*args` where the real function has none.
    """
    problems = list(differences(real, fake, name or getattr(real, "__qualname__", repr(real))))
    if problems:
        raise Mismatch("; ".join(problems))


def differences(real: Any, fake: Any, name: str) -> list[str]:
    """List the objections of `check_signature`; empty when all is well."""
    if inspect.isclass(fake):
        if not inspect.isclass(real):
            return [f"{name} is no class"]
        found = []
        for key, own in _offered(fake).items():
            if key == "__init__":
                found += _compared(real, fake, f"{name}()")
            elif not _has(real, key):
                found.append(f"{name} has no {key}")
            elif callable(own) or isinstance(own, (classmethod, staticmethod)):
                found += _compared(_plain(real, key), _plain(fake, key), f"{name}.{key}")
        return found
    return _compared(real, fake, name)


def _compared(real: Any, fake: Any, name: str) -> list[str]:
    if not callable(real):
        return [f"{name} cannot be called"]
    try:
        known = signatures(real)
    except ValueError as error:
        return [f"{name}: {error}"]
    mine = inspect.signature(fake)
    complaints = [_complaint(each, mine) for each in known]
    return [] if "" in complaints else [f"{name}: {complaints[0]}"]


def signatures(function: Any) -> list[inspect.Signature]:
    """All that a function accepts, overloads in turn. Raises ValueError where the library does not say."""
    text = function.__doc__ or ""
    if not inspect.isfunction(function) and not inspect.ismethod(function) and _BINDING.search(text):
        return of_binding(text)
    return [inspect.signature(function)]


_BINDING = re.compile(r"^(?:\d+\. )?(\w+)\((self: .*|)\) -> ", re.MULTILINE)


@cache
def of_binding(text: str) -> list[inspect.Signature]:
    """The signatures in a docstring that pybind11 wrote, without `self`."""
    found = []
    for match in _BINDING.finditer(text):
        parameters, kind = [], Kind.POSITIONAL_OR_KEYWORD
        for item in _split(match[2])[1:]:
            if item == "*":
                kind = Kind.KEYWORD_ONLY
                continue
            named, _, default = item.partition(" = ")
            label, _, annotation = named.partition(": ")
            place = Kind.POSITIONAL_ONLY if re.fullmatch(r"arg\d+", label) else kind
            parameters.append(
                Kind(label, place, default=default if default else Kind.empty, annotation=annotation.strip())
            )
        found.append(inspect.Signature(parameters))
    return found


def _split(text: str) -> list[str]:
    """Cut a text at the commas outside of brackets."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([<{") - (letter in ")]>}")
        if letter == "," and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    return [item for item in [*items, text[start:].strip()] if item]


class Stub:
    """A class of a .pyi file: methods with their overloads, properties and fields; those of its bases, too."""

    def __init__(self, path: Path, name: str) -> None:
        tree = _parsed(path)
        self.methods: dict[str, list[inspect.Signature]] = {}
        self.fields: set[str] = set()
        self._take(tree, name)

    def _take(self, scope: Any, name: str) -> None:
        for part in name.split("."):
            scope = next(node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == part)
        for base in scope.bases:
            self._take(_TREES[id(scope)], ast.unparse(base))
        methods: dict[str, list[inspect.Signature]] = {}
        for node in scope.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.fields.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                marks = {ast.unparse(mark) for mark in node.decorator_list}
                if any(mark == "property" or mark.endswith(".setter") for mark in marks):
                    self.fields.add(node.name)
                else:
                    methods.setdefault(node.name, []).append(_stubbed(node, "staticmethod" in marks))
        self.methods |= methods


_TREES: dict[int, ast.Module] = {}


@cache
def _parsed(path: Path) -> ast.Module:
    gc.disable()  # CPython 3.11 raises SystemError if it collects a coroutine meanwhile (gh-106905 of CPython)
    try:
        tree = ast.parse(path.read_text())
    finally:
        gc.enable()
    for node in ast.walk(tree):
        _TREES[id(node)] = tree
    return tree


def _stubbed(node: ast.FunctionDef, static: bool) -> inspect.Signature:
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [Kind.empty] * (len(plain) - len(given.defaults)) + [ast.unparse(each) for each in given.defaults]
    parameters = [
        Kind(each.arg, Kind.POSITIONAL_OR_KEYWORD, default=default)
        for each, default in zip(plain, defaults, strict=True)
    ]
    if given.vararg:
        parameters.append(Kind(given.vararg.arg, Kind.VAR_POSITIONAL))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(
            Kind(each.arg, Kind.KEYWORD_ONLY, default=Kind.empty if default is None else ast.unparse(default))
        )
    if given.kwarg:
        parameters.append(Kind(given.kwarg.arg, Kind.VAR_KEYWORD))
    return inspect.Signature(parameters[0 if static and (not parameters or parameters[0].name != "self") else 1 :])


def bound(
    known: Sequence[inspect.Signature],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fits: Callable[[str, Any], bool] = lambda annotation, value: True,
) -> inspect.BoundArguments:
    """The arguments under the first overload that takes them. Raises TypeError, as pybind11 does, where none does.

    `fits`: whether a value is of the type that a parameter is annotated with.
    """
    for signature in known:
        try:
            found = signature.bind(*args, **kwargs)
        except TypeError:
            continue
        kinds = {each.name: each.annotation for each in signature.parameters.values()}
        if all(fits(str(kinds[key]), value) for key, value in found.arguments.items()):
            return found
    supported = "\n".join(f"    {place}. {name}{each}" for place, each in enumerate(known, 1))
    raise TypeError(
        f"{name}(): incompatible function arguments. The following argument types are supported:\n{supported}\n\n"
        f"Invoked with: {', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])}"
    )


def _complaint(real: inspect.Signature, fake: inspect.Signature) -> str:
    """Say why a call that `fake` accepts would fail at `real`; empty where none would."""
    theirs, mine = dict(real.parameters), dict(fake.parameters)
    kinds = {parameter.kind for parameter in theirs.values()}
    for parameter in mine.values():
        if parameter.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD):
            if parameter.kind not in kinds:
                return f"the stand-in takes {parameter}, the real one takes {real}"
        elif parameter.name not in theirs and not (Kind.VAR_KEYWORD in kinds and parameter.kind is Kind.KEYWORD_ONLY):
            return f"the stand-in takes {parameter.name!r}, the real one takes {real}"
        elif parameter.default is not Kind.empty and _needed(theirs.get(parameter.name)):
            return f"the stand-in has a default for {parameter.name!r}, the real one takes {real}"
    for parameter in theirs.values():
        if _needed(parameter) and parameter.name not in mine and not _catches(mine, parameter):
            return f"the stand-in does without {parameter.name!r}, the real one takes {real}"
    ours, others = _by_place(mine), _by_place(theirs)
    if Kind.VAR_POSITIONAL not in kinds and ours != others[: len(ours)]:
        return f"positional arguments {ours}, the real one takes {real}"
    return ""


_VARIABLE = (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)


def _needed(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is Kind.empty and parameter.kind not in _VARIABLE


def _catches(mine: Mapping[str, inspect.Parameter], parameter: inspect.Parameter) -> bool:
    return any(
        each.kind is Kind.VAR_POSITIONAL or (each.kind is Kind.VAR_KEYWORD and parameter.kind is Kind.KEYWORD_ONLY)
        for each in mine.values()
    )


def _by_place(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [
        name for name, each in parameters.items() if each.kind in (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)
    ]


def _offered(fake: type) -> dict[str, Any]:
    """Find the names that code could use of a stand-in, those of its own bases included."""
    found: dict[str, Any] = {}
    for owner in reversed(fake.__mro__[:-1]):
        found |= {
            key: value
            for key, value in vars(owner).items()
            if key == "__init__" or not key.startswith("__") or key in ("__enter__", "__exit__", "__call__")
        }
    return {key: value for key, value in found.items() if not getattr(value, "standin_only", False)}


def standin_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that tests call, not code: `check_signature` leaves it out."""
    function.standin_only = True  # type: ignore[attr-defined]
    return function


def _has(real: type, key: str) -> bool:
    annotated = any(key in getattr(owner, "__annotations__", {}) for owner in real.__mro__)
    return hasattr(real, key) or annotated


def _plain(owner: type, key: str) -> Any:
    """The function behind a method, without `self`."""
    found = inspect.getattr_static(owner, key)
    if isinstance(found, (staticmethod, classmethod)) or not inspect.isfunction(found):
        return getattr(owner, key)
    signature = inspect.signature(found)

    def method() -> None: ...

    method.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return method

"""Takes the class of a script that trains, as TRL's: runs the function that makes it, or passes it on, that far."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

from slurm_rlhf.errors import EpisodeError
from slurm_rlhf.user_files import line_of, text_of

FACTORY = "environment_factory"
"""Argument of TRL's trainer that gets the class."""


def script_class(module: ModuleType, file: Path, place: str, name: str, started: bool) -> Any:
    """Return the class `name`, or the only one, that a function without parameters makes; None: there is none.

    Of a script that was `started` with arguments also one that such a function passes as `FACTORY`. The class keeps
    what the function has made and set before. `place` begins messages. Raises EpisodeError, also for several.
    """
    tree = ast.parse(file.read_bytes())
    futures = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and not _needed(one.args)]
    classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and name in ("", one.name)]
    lines = [(function, at, line) for function in functions for at, line in enumerate(function.body)]
    found = [(function, at + 1, one.name) for function, at, one in lines if one in classes]
    if not found and started:
        found = [(function, at, one) for function, at, line in lines if (one := _passed(line)) and name in ("", one)]
    if len(found) > 1:
        listed = ", ".join(f"{one} in {function.name}()" for function, _, one in found)
        raise EpisodeError(f"{place}: several classes could be it ({listed}): name one in the key, {file.name}:NAME")
    for function, end, made in found:
        answer = ast.copy_location(ast.Return(ast.Name(made, ast.Load())), function.body[end - 1])
        function.body = [*function.body[:end], ast.fix_missing_locations(answer)]
        function.decorator_list, own = [], dict[str, Any]()  # the module keeps its own function
        try:
            exec(compile(ast.Module([*futures, function], []), str(file), "exec"), vars(module), own)
            return own[function.name]()
        except (Exception, SystemExit) as error:
            raise EpisodeError(
                f"{line_of(file, error)}: {function.name}(), before it has {made}, raised {text_of(error)}; its "
                f"arguments are those of `slurm-rlhf serve-env {file.name} -- ARGUMENTS`"
            ) from error
    if not started and (inside := [one.name for one in classes if one not in tree.body]):
        raise EpisodeError(
            f"{place}: {inside[0]} stands inside a function: move it to the top of the file, with what it needs of it"
        )
    return None


def _passed(line: ast.stmt) -> str:
    """Return the name of the class that a statement passes as `FACTORY`; empty: none."""
    keywords = [one for one in ast.walk(line) if isinstance(one, ast.keyword) and one.arg == FACTORY]
    return next((one.value.id for one in keywords if isinstance(one.value, ast.Name)), "")


def _needed(given: ast.arguments) -> bool:
    """Tell whether there is a parameter without a default."""
    return len(given.posonlyargs + given.args) > len(given.defaults) or None in given.kw_defaults

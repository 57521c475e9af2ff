"""Takes a class that a function of the user's file makes, as `main()` of TRL's scripts: runs the function that far."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

from slurm_rlhf.errors import EpisodeError
from slurm_rlhf.user_files import line_of, text_of


def inner_class(module: ModuleType, file: Path, place: str, name: str = "") -> Any:
    """Return the class `name`, or the only one, that stands in a function without parameters; None: there is none.

    It keeps what the function has made before it. `place` begins messages. Raises EpisodeError, also for several.
    """
    tree = ast.parse(file.read_bytes())
    futures = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and not _needed(one.args)]
    classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and name in ("", one.name)]
    found = [(each, one) for each in functions for one in each.body if one in classes]
    if len(found) > 1:
        listed = ", ".join(f"{one.name} in {function.name}()" for function, one in found)
        raise EpisodeError(f"{place}: several classes could be it ({listed}): name one in the key, {file.name}:NAME")
    for function, made in found:
        answer = ast.copy_location(ast.Return(ast.Name(made.name, ast.Load())), made)
        function.body = [*function.body[: function.body.index(made) + 1], ast.fix_missing_locations(answer)]
        function.decorator_list, own = [], dict[str, Any]()  # the module keeps its own function
        try:
            exec(compile(ast.Module([*futures, function], []), str(file), "exec"), vars(module), own)
            return own[function.name]()
        except (Exception, SystemExit) as error:
            raise EpisodeError(
                f"{line_of(file, error)}: {function.name}(), up to its class {made.name}, raised {text_of(error)}; its "
                f"arguments are those of `slurm-rlhf serve-env {file.name} -- ARGUMENTS`"
            ) from error
    if inside := [one.name for one in classes if one not in tree.body]:
        raise EpisodeError(
            f"{place}: {inside[0]} stands inside a function: move it to the top of the file, with what it needs of it"
        )
    return None


def _needed(given: ast.arguments) -> bool:
    """Tell whether there is a parameter without a default."""
    return len(given.posonlyargs + given.args) > len(given.defaults) or None in given.kw_defaults

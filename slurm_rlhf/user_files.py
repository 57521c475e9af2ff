"""Run Python files of the user, and name the line in which one of their functions raised an error."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slurm_rlhf.errors import ConfigError, UserError


def run_file(file: Path, key: str, error_class: type[UserError], fix: str = "") -> ModuleType:
    """Run a Python file as a module; it may import from its directory, and from the package that it is a part of.

    `key`: the key of the configuration that names the file, for messages. If the file raises an exception, this raises
    `error_class` with file and line, and with the advice `fix` at the end. Raises ConfigError for a file that is not
    Python.
    """
    name = f"slurm_rlhf_user_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    root = file.parent
    while (root / "__init__.py").is_file():  # so that relative imports find their package
        root, name = root.parent, f"{root.name}.{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {file} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name. Files in its directory come last on the path, so that they hide nothing.
    sys.modules[name] = module
    sys.path += [place for place in dict.fromkeys(map(str, (file.parent, root))) if place not in sys.path]
    _running.append(file)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise error_class(f"{line_of(file, error)}: cannot be imported: {text_of(error)}{fix}") from error
    finally:
        _running.pop()
    return module


def file_and_name(text: str) -> tuple[str, str]:
    """Split FILE.py:NAME, where NAME is what the file defines; empty where the text is a file alone."""
    file, _, name = text.rpartition(":")
    return (file, name) if file.endswith(".py") and name.isidentifier() else (text, "")


def functions_in(module: ModuleType) -> list[str]:
    """Name the public functions that a module itself defines."""
    found = {name: one for name, one in vars(module).items() if inspect.isfunction(one) and not name.startswith("_")}
    return [name for name, one in found.items() if one.__module__ == module.__name__]


_running: list[Path] = []
_of_script: set[str] = set()


def note_origin(name: str) -> None:
    """Note whether a file of `run_file` or the script itself has registered the reward function `name`."""
    (_of_script.discard if _running else _of_script.add)(name)


def is_of_script(name: str) -> bool:
    """Tell whether the script itself has registered `name`, so that other processes do not know it."""
    return name in _of_script


def line_of(file: Path | str, error: BaseException) -> str:
    """Return file and line of the innermost frame in the user's file."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def file_of(function: Callable[..., Any]) -> str:
    """Return the file that defines a function, or the cell of a notebook; otherwise the function's name."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    return str(code.co_filename) if code is not None else getattr(function, "__name__", type(function).__name__)


def same_place(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Tell whether `other` is a new definition of `one`, as by a cell of a notebook that runs again."""
    return all(getattr(one, name, None) == getattr(other, name, "") for name in ("__module__", "__qualname__"))


def text_of(error: BaseException) -> str:
    """Return the type and the message of an error."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

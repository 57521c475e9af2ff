"""The user's reward function: a Python file with `reward_func(queries, prompts, labels, **kwargs)`, as in OpenRLHF.

What it can take, and an example: README.md, "The reward function".
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slurm_rlhf.errors import ConfigError, RewardError
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.arguments import Taken, taken
from slurm_rlhf.rewards.values import Rewards, parse_answer

FUNCTION = "reward_func"
KEY = "reward.remote_url"


class RewardFunction:
    """Calls the user's function and accepts nothing that is not one finite number per response."""

    def __init__(self, function: Callable[..., Any], file: Path, arguments: Taken) -> None:
        self._function = function
        self._file = file
        self._arguments = arguments

    @classmethod
    def load(cls, source: str) -> RewardFunction:
        """The function in the Python file `source`, whose directory is importable for it.

        Raises ConfigError when there is no such file or `source` is a URL, RewardError when the file cannot be run
        (with the line), does not define `reward_func`, or its signature takes what is not passed.
        """
        if source.startswith(("http://", "https://")):
            raise ConfigError(f"{KEY}: reward servers are not supported yet ({source}): name a Python file")
        file = Path(source).absolute()
        if not file.is_file():
            raise ConfigError(f"{KEY}: no such file: {source or repr('')}: name a Python file with {FUNCTION}")
        function = getattr(_run(file), FUNCTION, None)
        if not callable(function):
            raise RewardError(f"{file} does not define {FUNCTION}(queries, prompts, labels, **kwargs): add it")
        return cls(function, file, taken(function, f"{_defined(file, function)}: {FUNCTION}"))

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Rewards of `trajectories`, [N]; `prompts[i]` is the prompt of `trajectories[i]`.

        `step`: the training step that they are of; in an evaluation, the steps done before it. The function gets those
        of `reward_arguments.ARGUMENTS` that its signature takes. Raises RewardError for what it raises or answers.
        """
        try:
            answer = self._arguments.call(self._function, prompts, trajectories, step)
        except (Exception, SystemExit) as error:
            raise RewardError(f"{_place(self._file, error)}: {FUNCTION} raised {_told(error)}") from error
        return parse_answer(answer, len(trajectories), f"{self._file}: {FUNCTION}")


def _run(file: Path) -> ModuleType:
    """The file as a module of its own name."""
    name = f"slurm_rlhf_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{KEY}: {file} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name; neighbours come last, so that they shadow nothing.
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{_place(file, error)}: cannot be imported: {_told(error)}") from error
    return module


def _defined(file: Path, function: Callable[..., Any]) -> str:
    """file:line of the function, where it is in the file."""
    code = getattr(function, "__code__", None)
    return f"{file}:{code.co_firstlineno}" if code is not None and code.co_filename == str(file) else str(file)


def _place(file: Path, error: BaseException) -> str:
    """file:line of the deepest frame in the user's file."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _told(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

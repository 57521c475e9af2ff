"""Load and call the user's reward function: `reward_func(queries, prompts, labels, **kwargs)` as in OpenRLHF.

What it can take, and an example: README.md, "The reward function".
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slurm_rlhf.config.schema import Reward
from slurm_rlhf.errors import ConfigError, RewardError
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.arguments import Taken, taken
from slurm_rlhf.rewards.values import Rewards, parse_answer
from slurm_rlhf.user_files import file_of, line_of, run_file, same_place, text_of

FUNCTION = "reward_func"
KEY = "reward.remote_url"


Function = TypeVar("Function", bound=Callable[..., Any])

_REGISTERED: dict[str, Callable[..., Any]] = {}


def register_reward(function: Function, name: str = "", *, replace: bool = False) -> Function:
    """Make a reward function known by its name, so that `reward.function` can choose it; also a decorator.

    Call it in a Python file that `train.plugins` names. The function takes what `reward_func` in a file takes. `name`:
    the function's own, if empty. Raises ConfigError for a name that is taken, unless `replace` is set.
    """
    if not callable(function):
        raise ConfigError(f"register_reward takes a function, got {type(function).__name__}")
    name = name or getattr(function, "__name__", type(function).__name__)
    owner = _REGISTERED.get(name)
    if owner is not None and not replace and not same_place(owner, function):
        raise ConfigError(f"the reward name {name!r} is taken by {file_of(owner)}: register yours by another name")
    _REGISTERED[name] = function
    return function


class RewardFunction:
    """Call the user's function and accept only one finite number per response."""

    def __init__(self, function: Callable[..., Any], file: Path | str, arguments: Taken, name: str = FUNCTION) -> None:
        self._function = function
        self._file = file
        self._arguments = arguments
        self._name = name

    @classmethod
    def of(cls, config: Reward) -> RewardFunction:
        """Find the function that `config` names: one that is registered, or that of a file. Raises as `load`."""
        if not config.function:
            return cls.load(config.remote_url)
        name = config.function
        if name not in _REGISTERED:
            near = difflib.get_close_matches(name, _REGISTERED, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(sorted(_REGISTERED)) or "none"
            raise ConfigError(
                f"reward.function = {name!r} is not registered{meant} (registered: {known}): call "
                "slurm_rlhf.register_reward in a file that train.plugins names, or pass it to slurm_rlhf.train"
            )
        function = _REGISTERED[name]
        return cls(
            function, file_of(function), taken(function, f"{_defined(file_of(function), function)}: {name}"), name
        )

    @classmethod
    def load(cls, source: str) -> RewardFunction:
        """Load the function in the Python file `source`, whose directory is importable for it.

        Raises ConfigError when there is no such file or `source` is a URL, RewardError when the file cannot be run
        (with the line), does not define `reward_func`, or its signature takes what is not passed.
        """
        if source.startswith(("http://", "https://")):
            raise ConfigError(f"{KEY}: reward servers are not supported yet ({source}): name a Python file")
        file = Path(source).absolute()
        if not file.is_file():
            raise ConfigError(f"{KEY}: no such file: {source or repr('')}: name a Python file with {FUNCTION}")
        function = getattr(run_file(file, KEY, RewardError), FUNCTION, None)
        if not callable(function):
            raise RewardError(f"{file} does not define {FUNCTION}(queries, prompts, labels, **kwargs): add it")
        return cls(function, file, taken(function, f"{_defined(file, function)}: {FUNCTION}"))

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; `prompts[i]` is the prompt of `trajectories[i]`.

        `step`: the training step that they are of; in an evaluation, the steps done before it. The function gets those
        of `arguments.ARGUMENTS` that its signature takes. Raises RewardError for what it raises or answers.
        """
        try:
            answer = self._arguments.call(self._function, prompts, trajectories, step)
        except (Exception, SystemExit) as error:
            raise RewardError(f"{line_of(self._file, error)}: {self._name} raised {text_of(error)}") from error
        return parse_answer(answer, len(trajectories), f"{self._file}: {self._name}")


def _defined(file: Path | str, function: Callable[..., Any]) -> str:
    """Name file and line of the function, where it is defined in the file."""
    code = getattr(function, "__code__", None)
    return f"{file}:{code.co_firstlineno}" if code is not None and code.co_filename == str(file) else str(file)

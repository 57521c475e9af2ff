"""Load and call the user's reward function. It is called in a worker (`workers`), or in the conductor's process.

This file loads neither numpy nor the schema, so that a worker starts quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from slurm_rlhf import user_files
from slurm_rlhf.errors import ConfigError, RewardError, meant
from slurm_rlhf.rewards.items import Item, items_of
from slurm_rlhf.rewards.signature import Taken, of_trl, taken
from slurm_rlhf.user_files import file_and_name, file_of, functions_in, line_of, run_file, text_of

if TYPE_CHECKING:
    from slurm_rlhf.config.schema import Reward
    from slurm_rlhf.records import Prompt, Trajectory
    from slurm_rlhf.rewards.scored import Rewards

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
    if owner is not None and not replace and not user_files.same_place(owner, function):
        raise ConfigError(f"the reward name {name!r} is taken by {file_of(owner)}: register yours by another name")
    _REGISTERED[name] = function
    user_files.note_origin(name)
    return function


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """Call the user's function and accept only one finite number per response."""

    function: Callable[..., Any]
    file: Path | str
    arguments: Taken
    name: str = FUNCTION
    input_key: str = ""

    @classmethod
    def of(cls, config: Reward, input_key: str = "input") -> RewardFunction:
        """Find the function that `config` names, by reward.function or reward.remote_url. Raises as `load`."""
        return cls.named(config.function, input_key) if config.function else cls.load(config.remote_url, input_key)

    @classmethod
    def named(cls, name: str, input_key: str = "input") -> RewardFunction:
        """Find a function that is registered, or MODULE:NAME. Raises ConfigError, and RewardError as `load`."""
        if ":" in name and name not in _REGISTERED:
            place, _, own = name.partition(":")
            try:
                module = import_module(place)
            except Exception as error:
                fix = "install it, or name a file, reward.remote_url = FILE.py:NAME"
                raise RewardError(f"reward.function = {name!r}: cannot be imported: {text_of(error)}: {fix}") from error
            return cls._of(module, place, own, input_key)
        if name not in _REGISTERED:
            known = ", ".join(sorted(_REGISTERED)) or "none"
            raise ConfigError(
                f"reward.function = {name!r} is not registered{meant(name, _REGISTERED)} (registered: {known}): call "
                "slurm_rlhf.register_reward in a file that train.plugins names, pass it to slurm_rlhf.train, or write "
                "MODULE:NAME, as trl.rewards:accuracy_reward, where Python can import the module"
            )
        function = _REGISTERED[name]
        file = file_of(function)
        return cls(function, file, taken(function, f"{_defined(file, function)}: {name}"), name, input_key)

    @classmethod
    def load(cls, source: str, input_key: str = "input") -> RewardFunction:
        """Load the function in the Python file `source`, or FILE.py:NAME; the file may import from its directory.

        Raises ConfigError when there is no such file or `source` is a URL, RewardError when the file cannot be run
        (with the line), does not define the function, or the function needs an argument that is not passed.
        """
        path, name = file_and_name(source)
        file = Path(path).absolute()
        if not file.is_file():
            raise ConfigError(f"{KEY}: no such file: {source or repr('')}: name a Python file with {FUNCTION}")
        return cls._of(run_file(file, KEY, RewardError), str(file), name, input_key)

    @classmethod
    def _of(cls, module: ModuleType, place: str, name: str, input_key: str) -> RewardFunction:
        """Find the function in a module, which the user calls `place`.

        `name`: empty for reward_func, or for the only reward function for TRL in it.
        """
        rewards = [] if name else of_trl(module)
        name = name or (rewards[0] if len(rewards) == 1 and not hasattr(module, FUNCTION) else FUNCTION)
        function = getattr(module, name, None)
        if not callable(function):
            known = rewards or getattr(module, "__all__", []) or functions_in(module)
            kind = "rewards for TRL" if rewards else "functions"
            one = f"; its {kind} are {', '.join(known)}: name one, as {place}:{known[0]}" if known else ": add it"
            said = f"{FUNCTION}(queries, prompts, labels, **kwargs)" if name == FUNCTION else name
            raise RewardError(f"{place} does not define {said}{meant(name, known)}{one}")
        file = Path(place) if Path(place).is_file() else file_of(function)
        return cls(function, file, taken(function, f"{_defined(file, function)}: {name}"), name, input_key)

    @property
    def where(self) -> str:
        """Name file and function, as messages begin."""
        return f"{self.file}: {self.name}"

    def answer(self, items: Sequence[Item], step: int) -> Any:
        """Call the function for `items` and return its answer. Raises RewardError with file and line."""
        try:
            return self.arguments.call(self.function, items, step)
        except RewardError as error:
            raise RewardError(f"{self.where}: {error}") from error
        except (Exception, SystemExit) as error:
            raise RewardError(f"{line_of(self.file, error)}: {self.name} raised {text_of(error)}") from error

    def about(self) -> list[Any]:
        """Return `where`, and whether a reward may be None."""
        return [self.where, self.arguments.trl]

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N], in this process; `prompts[i]` is the prompt of `trajectories[i]`.

        `step`: the number of the training step; in an evaluation, of the steps done before it. The function gets those
        of `ARGUMENTS` that its signature takes. Raises RewardError if it raises, or for an invalid answer.
        """
        from slurm_rlhf.rewards.scored import parse_answer

        items = items_of(prompts, trajectories, self.input_key)
        return parse_answer(self.answer(items, step), len(trajectories), self.where, self.arguments.trl)


def importable(name: str) -> dict[str, Any]:
    """Return the module and name of a function that the script itself has registered, and sys.path, for workers.

    Raises ConfigError for a function that other processes cannot import.
    """
    function = _REGISTERED[name]
    module, known = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module), known, None) is not function:
        raise ConfigError(
            f"reward.workers: the reward function {name} is defined in the script or notebook itself, which workers "
            "cannot import: put it into a module and import it from there, or set config.reward.workers = 0, and it "
            "runs in this process"
        )
    return {"place": [module, known], "path": [str(Path(one).absolute()) for one in sys.path]}


def served(
    source: str, function: str, plugins: Sequence[str], place: Sequence[str] = (), path: Sequence[str] = ()
) -> RewardFunction:
    """Load the function in a worker: that of the file `source`, or one that a file of `plugins` registers.

    `place`: module and name of a function that a script has registered; `path`: the script's sys.path.
    """
    if place:
        sys.path += [one for one in path if one not in sys.path]
        register_reward(getattr(import_module(place[0]), place[1]), function, replace=True)
    for plugin in plugins if function else ():
        run_file(Path(plugin), "train.plugins", ConfigError)
    return RewardFunction.named(function) if function else RewardFunction.load(source)


def _defined(file: Path | str, function: Callable[..., Any]) -> str:
    """Name file and line of the function, where it is defined in the file."""
    code = getattr(function, "__code__", None)
    return f"{file}:{code.co_firstlineno}" if code is not None and code.co_filename == str(file) else str(file)

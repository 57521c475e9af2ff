"""Reads the environments of a user's file, of five conventions, and plays them in the process that has loaded it.

`ToolEnvironment` is TRL's: a class whose public methods are tools. `TextEnvironment` answers free text by
`step(messages)`. `AgentInstance` is that of OpenRLHF's agent file, which is read without openrlhf; its `AgentExecutor`
with an `execute` of its own is played by `executor`. `GymEnvironment` is that of skyrl-gym. Coroutines are awaited, all
of an episode on one loop.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from slurm_rlhf.environments._transformers import tokenizer_class
from slurm_rlhf.environments.executor import EXECUTOR, executor_of
from slurm_rlhf.environments.records import Answer, Begun, EnvironmentInfo, Messages, Start, Turn
from slurm_rlhf.environments.script import script_class
from slurm_rlhf.environments.user_class import UserClass, answer_calls, columns_of, reuse, schemas_of, tools_of
from slurm_rlhf.errors import EpisodeError, meant
from slurm_rlhf.user_files import file_and_name, functions_in, run_file

KEY = "env.path"
CLASS, SEVERAL, COLUMN = "Environment", "ENVIRONMENTS", "environment"
PAGE = "`slurm-rlhf docs environments` has an example"


class ToolEnvironment(UserClass):
    """Plays TRL's class: `reset(**columns) -> str | None`, tools, `get_reward()` if it has one.

    Functions of its file that take `environments`, as TRL's rewards do, add to the reward.
    """

    def begin(self, start: Start) -> Begun:
        if not isinstance(said := self.reset(start), str | None):
            raise self.wrong("reset", said, "a string, which goes after the last message, or None")
        messages = [dict(one) for one in start.messages]
        messages[-1]["content"] += said or ""
        self.completion = Messages()
        self.row = start.row | {"prompts": messages, "completions": self.completion}  # for reward functions
        return Begun(messages)

    def turn(self, turn: Turn) -> Answer:
        self.completion.append(turn.message)
        if not turn.calls:
            return Answer(done=True)
        messages, counts = answer_calls(self.instance, turn.calls, self.value)
        self.completion += [one | {"content": one.get("result", one["content"])} for one in messages]
        return Answer(messages, counts=counts)

    def end(self) -> Answer:
        rewarded = hasattr(self.instance, "get_reward")
        reward = self.number("get_reward", self.call("get_reward")) if rewarded else 0.0
        reward += sum(map(self._judged, _judges(self.made)))
        super().end()
        return Answer(reward=reward)

    def _judged(self, judge: Callable[..., Any]) -> float:
        """Call a reward function for this one environment; None: it does not apply."""
        columns = {name: [value] for name, value in columns_of(judge, self.row).items()}
        name, one = judge.__name__, {"environments": [self.instance]}
        found = self.run(name, lambda: judge(**{**columns, **one}))
        if not isinstance(found, list | tuple) or len(found) != 1:
            raise self.wrong(name, found, "a list with one reward for each environment")
        return 0.0 if found[0] is None else self.number(name, found[0])


class TextEnvironment(UserClass):
    """Plays a class with `reset(row) -> messages | str | None` and `step(messages) -> observation, reward, done`."""

    _ANSWER = "(observation, reward, done) with a finite number as reward"

    def begin(self, start: Start) -> Begun:
        given = self.reset(start)
        self.so_far = start.messages if given is None else self.messages("reset", given)
        return Begun(None if given is None else self.so_far)

    def turn(self, turn: Turn) -> Answer:
        self.so_far = [*self.so_far, {"role": "assistant", "content": turn.text}]
        answer = self.call("step", copy.deepcopy(self.so_far))
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise self.wrong("step", answer, self._ANSWER)
        observation, reward, done = answer
        messages = None if done and observation is None else self.messages("step", observation)
        self.so_far += messages or []
        return Answer(messages, reward=self.number("step", reward), done=bool(done))


class AgentInstance(UserClass):
    """Plays the class of OpenRLHF's agent file, whose texts get no chat template."""

    def begin(self, start: Start) -> Begun:
        self.call("__init__")
        self.start = start
        states = {"observation": start.text, "prompt": start.text, "label": start.label}
        self.so_far = str(self._read("reset", self.call("reset", states), "observation"))
        return Begun(text=None if self.so_far == start.text else self.so_far)

    def turn(self, turn: Turn) -> Answer:
        states = {"observation_text": self.so_far, "action_text": turn.text, "label": self.start.label}
        answer = self.call("step", {**states, "sampling_params": None})
        reward, said, done = (self._read("step", answer, name) for name in ("rewards", "environment_feedback", "done"))
        if answer.get("environment_images"):
            raise self.wrong("step", "environment_images", "text: models see no images here")
        self.so_far += turn.text + str(said)
        found = self.scored("step", answer, self.number("step", reward))
        found.text, found.done = str(said), bool(done)
        return found

    def _read(self, name: str, answer: Any, key: str) -> Any:
        if not isinstance(answer, dict) or key not in answer:
            raise self.wrong(name, answer, f"a dict with {key!r}")
        return answer[key]


class GymEnvironment(UserClass):
    """Plays a class of skyrl-gym: `init(prompt)`, `step(action)`, `close()`."""

    def begin(self, start: Start) -> Begun:
        taken = inspect.signature(self.made).parameters
        given = {"env_config": {}, "extras": {**start.row, "reward_spec": {"ground_truth": start.label}} | start.row}
        self.call("__init__", **{name: value for name, value in given.items() if name in taken})
        answer = self.call("init", copy.deepcopy(start.messages))
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self.wrong("init", answer, "(messages, info)")
        return Begun(self.messages("init", answer[0]))

    def turn(self, turn: Turn) -> Answer:
        answer = self.call("step", turn.text)
        if not isinstance(answer, Mapping) or not {"observations", "reward", "done"} <= answer.keys():
            raise self.wrong("step", answer, "a dict with observations, reward and done")
        messages = self.messages("step", answer["observations"]) if answer["observations"] else None
        return Answer(messages, reward=self.number("step", answer["reward"]), done=bool(answer["done"]))


KINDS: dict[str, Callable[[type, Path], Any]] = {
    "tools": ToolEnvironment,
    "text": TextEnvironment,
    "agent": AgentInstance,
    "gym": GymEnvironment,
    EXECUTOR: executor_of,
}
"""Convention -> what makes an environment of a class and its file. Its methods may each raise EpisodeError.

`begin(start)` begins an episode with a row of the data, `turn(turn)` answers what the policy has sampled, `end()` ends
the episode, over or not, and returns what it adds to the reward, `leave()` frees what it holds, over or not.
"""


def kind_of(made: type) -> str:
    """Name the convention of a class; empty: it follows none."""
    agent = _agent_module()
    if issubclass(made, agent.AgentInstanceBase):
        return "agent"
    if issubclass(made, agent.AgentExecutorBase):
        own = [one for one in made.__mro__ if not one.__module__.startswith((agent.__name__, __name__))]
        return EXECUTOR if any("execute" in vars(one) for one in own) else ""
    has = [name for name in ("init", "reset", "step") if callable(getattr(made, name, None))]
    if has == ["init", "step"]:
        return "gym"
    if "reset" not in has:
        return ""
    free = "step" in has and "messages" in inspect.signature(made.step).parameters  # type: ignore[attr-defined]
    return "text" if free else "tools" if tools_of(made) else ""


def load(file: Path, name: str = "", started: bool = False) -> dict[str, type]:
    """Run the user's file; return its environments by the name in the column `environment`, "" if there is but one.

    `name`: what to take from the file: a class, several by name, a function, which is the tool, or a list of functions.
    `started`: the file is a script that got arguments. Raises EpisodeError for a file without a usable class.
    """
    _agent_module()
    module = run_file(file, KEY, EpisodeError)
    chosen = getattr(module, name or SEVERAL, None)
    functions: Any = chosen if isinstance(chosen, list | tuple) else [chosen]
    if all(map(inspect.isfunction, functions)):  # as TRL's trainer takes tools
        own = {one.__name__: staticmethod(one) for one in functions}
        chosen = type(file.stem, (), {"reset": lambda self: None, "__module__": module.__name__, **own})
    if started or (name and chosen is None):
        chosen = _of_script(module, file, name, started) or chosen
    if name and chosen is None:
        known = [one for one, made in vars(module).items() if getattr(made, "__module__", "") == module.__name__]
        raise EpisodeError(f"{KEY}: {file} does not define {name}{meant(name, known)}; it has {', '.join(known)}")
    if not name and not isinstance(chosen, Mapping | type):
        chosen = _the_class(module, file)
    found: dict[str, Any] = dict(chosen) if isinstance(chosen, Mapping) else {"": chosen}
    for entry, made in found.items():
        if not inspect.isclass(made) or not kind_of(made):
            what = f"{SEVERAL}[{entry!r}]" if entry else f"its class {getattr(made, '__name__', made)}"
            raise EpisodeError(
                f"{KEY}: {file}: {what} is no environment: it needs reset and public methods, which are tools, or "
                f"reset and step(messages); {PAGE}"
            )
    return found


def _the_class(module: ModuleType, file: Path) -> Any:
    """Return the class `Environment`, an agent's instances, or the one class of the file that is an environment."""
    own = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    if inspect.isclass(named := getattr(module, CLASS, None)):
        return named
    if inspect.isclass(executor := getattr(module, "AgentExecutor", None)) and kind_of(executor) == EXECUTOR:
        return executor
    agents = [one for one in own if kind_of(one) == "agent"]
    fit = agents or [one for one in own if kind_of(one)]
    if len(fit) == 1 or (not fit and (inside := _of_script(module, file, "", False)) is not None):
        return fit[0] if fit else inside
    what = f"several classes could be it ({', '.join(one.__name__ for one in fit)})" if fit else f"no class {CLASS}"
    fix = f"name it {CLASS}, or in the key, {file.name}:NAME, or several in {SEVERAL} = {{name: class}}"
    raise EpisodeError(f"{KEY}: {file}: {what}: {fix}; {PAGE}")


def _of_script(module: ModuleType, file: Path, name: str, started: bool) -> Any:
    """Return what `script_class` finds. Its instances are used again, as TRL does."""
    if (made := script_class(module, file, f"{KEY}: {file}", name, started)) is not None:
        reuse(made)
    return made


def _agent_module() -> ModuleType:
    """Return OpenRLHF's module with the bases of agents; make one that stands in where openrlhf is not installed."""
    name = "openrlhf.utils.agent"
    if name not in sys.modules and importlib.util.find_spec("openrlhf") is None:
        for part in ("openrlhf", "openrlhf.utils", name):
            sys.modules[part] = ModuleType(part)
        bases = vars(sys.modules[name])
        bases |= {base: type(base, (), {}) for base in ("AgentInstanceBase", "AgentExecutorBase")}
        bases["MultiTurnAgentExecutor"] = type("MultiTurnAgentExecutor", (bases["AgentExecutorBase"],), {})
    return importlib.import_module(name)


class Instances:
    """Holds the environments of the episodes that this process plays, by the number of the episode."""

    def __init__(self, file: str, arguments: Sequence[str] = ()) -> None:
        """`arguments`: those that the file gets as a script. Raises as `load`."""
        path, name = file_and_name(file)
        self.file = Path(path)
        before, sys.argv = sys.argv, [path, *arguments]
        try:
            self.classes = load(self.file, name, bool(arguments))
        finally:
            sys.argv = before
        if EXECUTOR in map(kind_of, self.classes.values()):
            tokenizer_class()  # now, so that no call of an episode waits for it
        self.played: dict[int, Any] = {}

    def describe(self) -> dict[str, Any]:
        """Describe each environment, as `EnvironmentInfo`. Raises EpisodeError for a tool without type hints, and for a
        class with arguments."""
        return {name: msgspec.to_builtins(self._described(made)) for name, made in self.classes.items()}

    def begin(self, number: int, given: Any) -> Any:
        """Begin an episode with a `Start`; return a `Begun`. Raises EpisodeError."""
        start = msgspec.convert(given, Start)
        name = str(start.row.get(COLUMN, "")) if "" not in self.classes else ""
        if name not in self.classes:
            raise EpisodeError(
                f"{self.file}: the column {COLUMN!r} of a row names {name!r}{meant(name, self.classes)}; {SEVERAL} has "
                f"{', '.join(self.classes)}"
            )
        made = self.classes[name]
        self.played[number] = KINDS[kind_of(made)](made, self.file)
        begun = self.played[number].begin(start)
        begun.name = name
        return msgspec.to_builtins(begun)

    def turn(self, number: int, given: Any) -> Any:
        """Answer a `Turn` by an `Answer`. Raises EpisodeError."""
        return msgspec.to_builtins(self.played[number].turn(msgspec.convert(given, Turn)))

    def end(self, number: int) -> Any:
        """End an episode; return an `Answer`. Raises EpisodeError."""
        return msgspec.to_builtins(self.played[number].end())

    def drop(self, number: int) -> None:
        """Forget an episode, over or not."""
        if (played := self.played.pop(number, None)) is not None:
            played.leave()

    def _described(self, made: Any) -> EnvironmentInfo:
        kind = kind_of(made)
        needed = [] if kind == "gym" else _required(made.__init__)
        if needed:
            raise EpisodeError(
                f"{self.file}: {made.__name__}.__init__ needs {', '.join(needed)}: give defaults, reset gets the row"
            )
        reset = [name for name in _required(made.reset) if name != "row"] if kind in ("tools", "text") else []
        if kind != "tools":
            return EnvironmentInfo(kind, [], reset)
        rewarded = hasattr(made, "get_reward") or bool(_judges(made))
        return EnvironmentInfo(kind, schemas_of(made, str(self.file)), reset, rewarded)


def _judges(made: type) -> list[Callable[..., Any]]:
    """List the functions in the file of a class that take `environments`, as TRL's rewards do."""
    module = sys.modules[made.__module__]
    own = [getattr(module, name) for name in functions_in(module)]
    return [one for one in own if "environments" in inspect.signature(one).parameters]


def _required(method: Callable[..., Any]) -> list[str]:
    """List the parameters of a method that have no default, without self."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variable]

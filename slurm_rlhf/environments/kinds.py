"""Reads the environments of a user's file, of four conventions, and plays them in the process that has loaded it.

`ToolEnvironment` is TRL's: a class whose public methods are tools. `TextEnvironment` answers free text by
`step(messages)`. `AgentInstance` is that of OpenRLHF's agent file, which is read without openrlhf. `GymEnvironment` is
that of skyrl-gym. Coroutines are awaited, all of an episode on one loop.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from slurm_rlhf.environments.records import Answer, Begun, Messages, Start, Tools, Turn
from slurm_rlhf.environments.tools import answer_calls, schemas_of, tools_of
from slurm_rlhf.errors import EpisodeError, cut, meant
from slurm_rlhf.user_files import line_of, run_file, text_of

KEY = "env.path"
CLASS, SEVERAL, COLUMN = "Environment", "ENVIRONMENTS", "environment"
PAGE = "`slurm-rlhf docs environments` has an example"


class Played(Protocol):
    """Declares what an environment of any convention does in an episode. Each method may raise EpisodeError."""

    def begin(self, start: Start) -> Begun:
        """Begin an episode with a row of the data."""

    def turn(self, turn: Turn) -> Answer:
        """Answer what the policy has sampled."""

    def end(self) -> Answer:
        """End an episode, over or not; return what it adds to the reward."""


class _Own:
    """Calls the methods of a user's instance, and names file and line of what they raise."""

    def __init__(self, made: Any, file: Path) -> None:
        self.made, self.file, self.loop = made, file, asyncio.new_event_loop()
        self.instance: Any = made.__new__(made)

    def create(self, *arguments: Any, **named: Any) -> None:
        """Call `__init__`, which OpenRLHF allows to be a coroutine."""
        self.call("__init__", *arguments, **named)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method. Raises EpisodeError."""
        return self.run(f"{self.made.__name__}.{name}", lambda: getattr(self.instance, name)(*arguments, **named))

    def run(self, what: str, work: Callable[[], Any]) -> Any:
        """Do what runs the user's code. Raises EpisodeError."""
        try:
            return self.value(work())
        except (Exception, SystemExit) as error:
            raise EpisodeError(f"{line_of(self.file, error)}: {what} raised {text_of(error)}") from error

    def value(self, found: Any) -> Any:
        """Wait for a coroutine."""
        return self.loop.run_until_complete(found) if inspect.isawaitable(found) else found

    def wrong(self, name: str, answer: Any, expected: str) -> EpisodeError:
        """Make the error for an answer that no episode can go on with."""
        shown = f"returned {cut(repr(answer), 80)}; expected {expected}"
        return EpisodeError(f"{self.file}: {self.made.__name__}.{name} {shown}")

    def number(self, name: str, answer: Any) -> float:
        """Read a reward: a finite number, or anything that `float` takes, as a tensor of one element."""
        try:
            if not isinstance(answer, str) and math.isfinite(found := float(answer)):
                return found
        except (TypeError, ValueError):
            pass
        raise self.wrong(name, answer, "a finite number as reward")

    def messages(self, name: str, given: Any) -> Messages:
        """Read messages; a text is one of the user."""
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        if isinstance(given, list) and given and all(isinstance(one, dict) and "role" in one for one in given):
            return [dict(one) for one in given]
        raise self.wrong(name, given, "a string or a list of messages")

    def reset(self, start: Start) -> Any:
        """Call `reset` with the row as `row`, or with those of its columns that it names."""
        self.create()
        if "row" in inspect.signature(self.instance.reset).parameters:
            return self.call("reset", copy.deepcopy(start.row))
        return self.call("reset", **_columns(self.instance.reset, start.row))

    def close(self) -> None:
        """Let the environment free what it holds, if it has `close`."""
        if hasattr(self.instance, "close"):
            self.call("close")
        self.loop.close()


class ToolEnvironment(_Own):
    """Plays TRL's class: `reset(**columns) -> str | None`, tools, `get_reward()` if it has one.

    Functions of its file that take `environments`, as TRL's rewards do, add to the reward.
    """

    def begin(self, start: Start) -> Begun:
        self.row = start.row
        if not isinstance(said := self.reset(start), str | None):
            raise self.wrong("reset", said, "a string, which goes behind the last message, or None")
        messages = [dict(one) for one in start.messages]
        messages[-1]["content"] += said or ""
        return Begun(messages)

    def turn(self, turn: Turn) -> Answer:
        if not turn.calls:
            return Answer(done=True)
        messages, counts = answer_calls(self.instance, turn.calls, self.value)
        return Answer(messages, counts=counts)

    def end(self) -> Answer:
        rewarded = hasattr(self.instance, "get_reward")
        reward = self.number("get_reward", self.call("get_reward")) if rewarded else 0.0
        reward += sum(map(self._judged, judges_of(self.made)))
        self.close()
        return Answer(reward=reward)

    def _judged(self, judge: Callable[..., Any]) -> float:
        """Call a reward function for this one environment; None: it does not apply."""
        columns = {name: [value] for name, value in _columns(judge, self.row).items()}
        name, one = judge.__name__, {"environments": [self.instance]}
        found = self.run(name, lambda: judge(**{**columns, **one}))
        if not isinstance(found, list | tuple) or len(found) != 1:
            raise self.wrong(name, found, "a list with one reward for each environment")
        return 0.0 if found[0] is None else self.number(name, found[0])


class TextEnvironment(_Own):
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

    def end(self) -> Answer:
        self.close()
        return Answer()


class AgentInstance(_Own):
    """Plays the class of OpenRLHF's agent file, whose texts get no chat template."""

    def begin(self, start: Start) -> Begun:
        self.create()
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
        score, logs = answer.get("scores"), answer.get("extra_logs") or {}
        self.so_far += turn.text + str(said)
        return Answer(
            text=str(said),
            reward=self.number("step", reward),
            done=bool(done),
            score=None if score is None else self.number("step", score),
            logs={str(name): self.number("step", value) for name, value in logs.items()},
        )

    def end(self) -> Answer:
        self.close()
        return Answer()

    def _read(self, name: str, answer: Any, key: str) -> Any:
        if not isinstance(answer, dict) or key not in answer:
            raise self.wrong(name, answer, f"a dict with {key!r}")
        return answer[key]


class GymEnvironment(_Own):
    """Plays a class of skyrl-gym: `init(prompt)`, `step(action)`, `close()`."""

    def begin(self, start: Start) -> Begun:
        taken = inspect.signature(self.made).parameters
        given = {"env_config": {}, "extras": {**start.row, "reward_spec": {"ground_truth": start.label}} | start.row}
        self.create(**{name: value for name, value in given.items() if name in taken})
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

    def end(self) -> Answer:
        self.close()
        return Answer()


KINDS: dict[str, Callable[[type, Path], Played]] = {
    "tools": ToolEnvironment,
    "text": TextEnvironment,
    "agent": AgentInstance,
    "gym": GymEnvironment,
}


def _columns(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the columns of a row that a function names; all of them where it takes any."""
    parameters = inspect.signature(function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: copy.deepcopy(value) for name, value in row.items() if every or name in parameters}


def judges_of(made: type) -> list[Callable[..., Any]]:
    """List the reward functions in the file of a class that take its instances."""
    found = inspect.getmembers(sys.modules[made.__module__], inspect.isfunction)
    own = [one for _, one in found if one.__module__ == made.__module__]
    return [one for one in own if "environments" in inspect.signature(one).parameters]


def kind_of(made: type) -> str:
    """Name the convention of a class; empty: it follows none."""
    if issubclass(made, _agent_base()):
        return "agent"
    has = [name for name in ("init", "reset", "step") if callable(getattr(made, name, None))]
    if has == ["init", "step"]:
        return "gym"
    if "reset" not in has:
        return ""
    free = "step" in has and "messages" in inspect.signature(made.step).parameters  # type: ignore[attr-defined]
    return "text" if free else "tools" if tools_of(made) else ""


def load(file: Path) -> dict[str, type]:
    """Run the user's file; return its environments by the name in the column `environment`, "" if there is but one.

    Raises EpisodeError for a file without a usable class.
    """
    _agent_base()
    module = run_file(file, KEY, EpisodeError)
    several = getattr(module, SEVERAL, None)
    found: dict[str, Any] = dict(several) if isinstance(several, Mapping) else {"": _the_class(module, file)}
    for name, made in found.items():
        if not inspect.isclass(made) or not kind_of(made):
            what = f"{SEVERAL}[{name!r}]" if name else f"its class {getattr(made, '__name__', made)}"
            raise EpisodeError(
                f"{KEY}: {file}: {what} is no environment: it needs reset and public methods, which are tools, or "
                f"reset and step(messages); {PAGE}"
            )
    return found


def _the_class(module: ModuleType, file: Path) -> Any:
    """Return the class `Environment`, an agent's instances, or the one class of the file that is an environment."""
    own = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    if (named := getattr(module, CLASS, None)) is not None and inspect.isclass(named):
        return named
    executor = getattr(module, "AgentExecutor", None)
    agents = [one for one in own if kind_of(one) == "agent"]
    if executor is not None and "execute" in vars(executor):
        raise EpisodeError(
            f"{KEY}: {file}: AgentExecutor.execute samples with an engine of its own, which is not possible here: "
            "write what it does between turns as reset and step of an AgentInstance"
        )
    fit = agents or [one for one in own if kind_of(one)]
    if len(fit) == 1:
        return fit[0]
    what = f"several classes could be it ({', '.join(one.__name__ for one in fit)})" if fit else f"no class {CLASS}"
    raise EpisodeError(f"{KEY}: {file}: {what}: name it {CLASS}, or several in {SEVERAL} = {{name: class}}; {PAGE}")


def _agent_base() -> type:
    """Return OpenRLHF's base class of agents; make a module that stands in where openrlhf is not installed."""
    name = "openrlhf.utils.agent"
    if name not in sys.modules and importlib.util.find_spec("openrlhf") is None:
        for part in ("openrlhf", "openrlhf.utils", name):
            sys.modules[part] = ModuleType(part)
        for base in ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor"):
            setattr(sys.modules[name], base, type(base, (), {}))
    found: type = importlib.import_module(name).AgentInstanceBase
    return found


class Instances:
    """Holds the environments of the episodes that this process plays, by the number of the episode."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.classes = load(self.file)
        self.played: dict[int, Played] = {}

    def describe(self) -> dict[str, Any]:
        """Describe each environment, as `Tools`. Raises EpisodeError for a tool without type hints, or a class with
        arguments."""
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
        self.played.pop(number, None)

    def _described(self, made: Any) -> Tools:
        kind = kind_of(made)
        where = partial("{}: {}.{}".format, self.file, made.__name__)
        needed = [] if kind == "gym" else _required(made.__init__)
        if needed:
            raise EpisodeError(
                f"{where('__init__')} needs {', '.join(needed)}: each episode makes one without arguments"
            )
        reset = [name for name in _required(made.reset) if name != "row"] if kind in ("tools", "text") else []
        return Tools(kind, schemas_of(made, str(self.file)) if kind == "tools" else [], reset)


def _required(method: Callable[..., Any]) -> list[str]:
    """List the parameters of a method, but for self, that have no default."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variable]

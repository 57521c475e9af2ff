"""The conventions of environments: what their classes are given, what they may answer, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from user_environments import TOOLS, instances, start

from slurm_rlhf.environments.records import (
    ARGUMENTS,
    CALLS,
    RAISED,
    UNKNOWN,
    UNREADABLE,
    ToolCall,
    Turn,
)
from slurm_rlhf.errors import EpisodeError

TEXT = """
class Environment:
    def reset(self, row):
        self.row = row
        return row.get("start")

    def step(self, messages):
        return eval(self.row["answer"])
"""
AGENT = '''
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class One:
    """As a tensor of one element."""
    def __float__(self): return 1.0

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"] + "!"}

    async def step(self, states, **kwargs):
        self.turns += 1
        said = [states["observation_text"], states["action_text"], states["label"]]
        return {"rewards": One(), "scores": 0.5, "environment_feedback": str(said), "done": self.turns > 1,
                "sampling_params": states["sampling_params"], "extra_logs": {"turns": self.turns, "reward": One()}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
'''
GYM = """
class Gym:
    def __init__(self, env_config, extras={}):
        self.extras = extras

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "and " + self.extras["more"]}], {}

    def step(self, action):
        said = [{"role": "user", "content": action}]
        return {"observations": said, "reward": 1, "done": action == "b", "metadata": {}}

    def close(self):
        print("closed")
"""


def test_public_methods_are_tools(tmp_path: Path) -> None:
    made = instances(tmp_path, TOOLS)
    (tools,) = made.describe().values()
    assert [tools.kind, tools.columns] == ["tools", []]
    by = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert sorted(by) == ["add", "wait"]
    assert by["add"]["description"] == "Adds to the count."
    assert by["add"]["parameters"]["required"] == ["times"]
    begun = made.begin(7, start(by=2, hint=" there"))
    assert begun.messages == [{"role": "user", "content": "hi there"}]
    made.begin(8, start())
    answer = made.turn(7, Turn("", [ToolCall("add", {"times": 3}), ToolCall("wait")]))
    assert [(one["name"], one["content"]) for one in answer.messages or []] == [("add", "6"), ("wait", '{"?": 6}')]
    assert (answer.counts, answer.done) == ({CALLS: 2}, False)
    assert made.turn(7, Turn("that is all")).done
    assert (made.end(7).reward, made.end(8).reward, made.instances.played) == (0.6, 0.0, {})


FUNCTIONS = '''
def rows(first: int, count: int = 2) -> list[int]:
    """
    Lists numbers.

    Args:
        first: The first.
        count: How many.
    """
    return [*range(first, first + count)]

def nothing() -> None:
    """Does nothing."""

tools = [rows, nothing]

class Static:
    def reset(self): ...

    rows = staticmethod(rows)
'''


@pytest.mark.parametrize(
    ("name", "names"), [("rows", ["rows"]), ("tools", ["nothing", "rows"]), ("Static", ["rows"]), ("", ["rows"])]
)
def test_functions_alone_are_tools(tmp_path: Path, name: str, names: list[str]) -> None:
    """As TRL's trainer takes them: FILE.py:NAME names one, or a list; none of their parameters is `self`."""
    made = instances(tmp_path, FUNCTIONS, name)
    schemas = [schema["function"] for schema in made.describe()[""].schemas]
    assert [schema["name"] for schema in schemas] == names
    assert schemas[-1]["parameters"]["required"] == ["first"]
    made.begin(0, start())
    (message,) = made.turn(0, Turn("", [ToolCall("rows", {"first": 3})])).messages or []
    assert (message["content"], message["result"]) == ("[3, 4]", [3, 4])
    assert made.end(0).reward == 0.0
    with pytest.raises(EpisodeError, match=r"does not define row; did you mean rows\?; it has rows, nothing, Static"):
        instances(tmp_path, FUNCTIONS, "row")


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (ToolCall("ad"), UNKNOWN, "error: there is no tool 'ad'; did you mean add?; there are add, wait"),
        (ToolCall("_hidden"), UNKNOWN, "there is no tool"),
        (ToolCall("get_reward"), UNKNOWN, "there is no tool"),
        (ToolCall("add", {"times": "3"}), ARGUMENTS, "arguments of add: Expected `int`, got `str` - at `$.times`"),
        (ToolCall("add"), ARGUMENTS, "missing required field `times`"),
        (ToolCall("add", {"times": 1, "name": 2}), ARGUMENTS, "unknown field `name`"),
        (ToolCall("add", {"times": 101}), RAISED, "error: ValueError: too often"),
        (ToolCall("add", {"times": 102}), RAISED, "error: SystemExit: too often"),
        (ToolCall("add", {"times": 100}), RAISED, "error: TypeError: keys must be str"),  # no JSON
        (ToolCall("", error="not complete"), UNREADABLE, "error: not complete"),
    ],
)
def test_a_bad_call_is_answered_and_counted(tmp_path: Path, call: ToolCall, kind: str, said: str) -> None:
    made = instances(tmp_path, TOOLS)
    made.begin(0, start())
    answer = made.turn(0, Turn("", [call]))
    assert answer.counts == {CALLS: 1, kind: 1}
    assert said in (answer.messages or [])[0]["content"]


def test_free_text_is_answered(tmp_path: Path) -> None:
    made = instances(tmp_path, TEXT)
    assert made.describe()[""].kind == "text"
    assert made.begin(0, start(answer="str(len(messages)), 0.5, False")).messages is None
    answer = made.turn(0, Turn("a"))
    assert (answer.messages, answer.reward, answer.done) == ([{"role": "user", "content": "2"}], 0.5, False)
    assert (made.turn(0, Turn("b")).messages or [])[0]["content"] == "4"
    assert made.begin(1, start(start="go", answer="None, 1, True")).messages == [{"role": "user", "content": "go"}]
    assert made.turn(1, Turn("a")).done


def test_an_agent_file_is_read_as_it_is(tmp_path: Path) -> None:
    made = instances(tmp_path, AGENT)
    assert made.begin(0, start(label="x")).text == "<hi>!"
    first = made.turn(0, Turn("a"))
    assert (first.text, first.reward, first.score, first.done) == ("['<hi>!', 'a', 'x']", 1.0, 0.5, False)
    second = made.turn(0, Turn("b"))
    assert (second.text, second.logs, second.done) == (
        str([f"<hi>!a{first.text}", "b", "x"]),
        {"turns": 2.0, "reward": 1.0},
        True,
    )


def judged(directory: Path, code: str) -> float:
    made = instances(directory, TOOLS.replace("def get_reward", "def _unused") + code)
    made.begin(0, start(by=3, answer=4))
    made.turn(0, Turn("", [ToolCall("add", {"times": 5})], message={"role": "assistant", "content": "five"}))
    reward: float = made.end(0).reward
    return reward


def test_reward_functions_of_its_file_that_take_environments_are_added(tmp_path: Path) -> None:
    judges = (
        "\ndef score(environments, **kwargs):\n    return [env.count for env in environments]\n"
        "def near(environments, answer):\n    return [float(answer[0] == 4)]\n"
        "def heard(completions, prompts, environments):\n"
        "    said = [[one['content'] for one in messages] for messages in prompts + completions]\n"
        "    return [float(said == [['hi'], ['five', '15']])]\n"
        "def other(environments, **kwargs):\n    return [None for env in environments]\n"
        "def no_judge(completions, **kwargs):\n    return [100.0]\n"
    )
    assert judged(tmp_path, judges) == 17.0
    silent = TOOLS.replace("def get_reward", "def _unused")
    made = [instances(tmp_path, code).describe()[""].rewards for code in (TOOLS, silent + judges, silent)]
    assert made == [True, True, False]
    with pytest.raises(EpisodeError, match=r"score returned \[1, 2\]; expected a list with one reward"):
        judged(tmp_path, "\ndef score(environments):\n    return [1, 2]\n")
    with pytest.raises(EpisodeError, match=r"game.py:\d+: score raised AttributeError"):
        judged(tmp_path, "\ndef score(environments):\n    return [environments[0].lost]\n")


def test_a_class_of_skyrl_gym_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = instances(tmp_path, GYM)
    assert (made.begin(0, start(more="more")).messages or [])[-1]["content"] == "and more"
    assert [made.turn(0, Turn(text)).done for text in "ab"] == [False, True]
    made.end(0)
    made.instances.drop(0)
    assert capsys.readouterr().out == "closed\n"
    made.begin(1, start(more="more"))
    made.instances.drop(1)  # lost, or given up
    assert capsys.readouterr().out == "closed\n"


def test_the_row_chooses_one_of_several(tmp_path: Path) -> None:
    made = instances(tmp_path, f"{TOOLS}\n{TEXT}\nENVIRONMENTS = {{'count': Counter, 'free': Environment}}")
    assert {name: tools.kind for name, tools in made.describe().items()} == {"count": "tools", "free": "text"}
    assert made.begin(0, start(environment="free")).name == "free"
    with pytest.raises(EpisodeError, match=r"'environment' of a row names 'fre'; did you mean free\?"):
        made.begin(1, start(environment="fre"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "no class Environment"),
        ("def Environment(): ...", "no class Environment"),
        ("def main():\n    class Game: ...", "its class Game is no environment"),
        ("def made(by):\n    exit(by)\n    class Game: ...", "Game stands inside a function: move it to the top"),
        ("def main():\n    if True:\n        class Game: ...", "Game stands inside a function: move it to the top"),
        ("class Environment:\n    def reset(self, row): ...", "its class Environment is no environment"),
        ("class Environment:\n    def step(self, messages): ...", "its class Environment is no environment"),
        ("import nothing_of_that_name", "game.py:1: cannot be imported"),
        (TEXT.replace("Environment", "A") + TEXT.replace("Environment", "B"), "several classes could be it"),
        ("ENVIRONMENTS = {'a': 3}", r"ENVIRONMENTS\['a'\] is no environment"),
        (TOOLS.replace("times: int", "times"), r"game.py:11: the tool Counter.add cannot be described.*type hint"),
        (TOOLS.replace("            times: How often.\n", ""), "the tool Counter.add cannot be described"),
        (TOOLS.replace("times: int", "times: complex"), "the tool Counter.add cannot be described"),
        (TOOLS.replace("names: list[str] | None = None", "*names: str"), "takes any arguments"),
        (TEXT + "\n    def __init__(self, size): ...", "Environment.__init__ needs size"),
    ],
)
def test_what_is_no_environment_is_refused(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(EpisodeError, match=said):
        instances(tmp_path, code).describe()


def test_columns_that_a_row_must_have_are_reported(tmp_path: Path) -> None:
    assert instances(tmp_path, TOOLS.replace("by: int = 1", "by: int")).describe()[""].columns == ["by"]


@pytest.mark.parametrize(
    ("code", "answer", "said"),
    [
        (TEXT, "{}['lost']", r"game.py:8: Environment.step raised KeyError: 'lost'"),
        (TEXT, "exit(3)", r"Environment.step raised SystemExit: 3"),
        (TEXT, "3", r"step returned 3; expected \(observation, reward, done\)"),
        (TEXT, "None", r"step returned None; expected \(observation, reward, done\)"),
        (TEXT, '"no", float("nan"), False', "returned nan; expected a finite number"),
        (TEXT, '"no", "1", False', "returned '1'; expected a finite number"),
        (TEXT, '"no", [1], False', r"returned \[1\]; expected a finite number"),
        (TEXT, "None, 1, False", "step returned None; expected a string"),
        (TEXT, '[{"role": "user", "content": "a"}, "b"], 1, False', "expected a string or a list of messages"),
        (TOOLS.replace('columns.get("hint")', "3"), "", "reset returned 3; expected a string, .* or None"),
        (AGENT.replace('"scores": 0.5', '"environment_images": ["a"]'), "", "expected text: models see no images here"),
        (AGENT.replace('"rewards": One()', '"reward": 1'), "", "step returned {.*; expected a dict with 'rewards'"),
        (GYM.replace("}], {}", "}]"), "", r"init returned \[.*; expected \(messages, info\)"),
        (GYM.replace('"reward": 1', '"rewards": 1'), "", "step returned .*; expected a dict with observations, reward"),
    ],
)
def test_an_answer_that_cannot_be_used_is_named(tmp_path: Path, code: str, answer: str, said: str) -> None:
    made, row = instances(tmp_path, code), start(answer=answer, more="more", label="x")
    with pytest.raises(EpisodeError, match=said):
        (made.begin(0, row), made.turn(0, Turn("a")))

"""Classes that a function of a user's script makes, or passes to a trainer, as TRL's examples do."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from user_environments import TOOLS, instances, start

from slurm_rlhf.environments.records import ToolCall, Turn
from slurm_rlhf.errors import EpisodeError

SCRIPT = f"""
from __future__ import annotations
import argparse, sys

def main(times: int = 2) -> Later:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", type=int, default=1)
    given = parser.parse_args().by * times
{textwrap.indent(TOOLS.replace("= 0, by", "= 0, by * given"), "    ")}
    sys.exit("the training begins")
"""
"""As TRL's examples, with their class in `main`."""

SETS = f"""
import sys

{TOOLS.replace("= 0, by", "= 0, by * Counter.given")}
class Other(Counter): ...

def main():
    Counter.given = int(sys.argv[2])
    trainer = sys.exit(dict(environment_factory=Counter))
"""
"""As TRL's examples whose `main` sets what a class at the top needs, as addresses."""


@pytest.mark.parametrize(
    ("code", "name", "arguments", "by", "end"),
    [
        (SCRIPT, "", (), 2, "the training begins"),
        (SCRIPT, "Counter", ("--by", "3"), 6, "the training begins"),
        (SETS, "", ("--by", "3"), 3, "environment_factory"),
        (SETS, "Counter", ("--by", "3"), 3, "environment_factory"),
    ],
)
def test_a_class_that_a_function_makes_or_passes_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str, arguments: tuple[str, ...], by: int, end: str
) -> None:
    """The function runs up to that, and no further; methods of the class see its variables."""
    monkeypatch.setattr(sys, "argv", before := ["pytest"])
    made = instances(tmp_path, code, name, *arguments)
    assert sys.argv is before
    assert [schema["function"]["name"] for schema in made.describe()[""].schemas] == ["add", "wait"]
    made.begin(0, start())
    made.turn(0, Turn("", [ToolCall("add", {"times": 5})]))
    assert made.end(0).reward == by / 2
    made.begin(1, start())
    before, after = made.instances.played[1].used, made.end(1).reward
    assert (type(before).__name__, after) == ("Counter", 0.0)  # as in TRL, it is reset for the next episode
    module = sys.modules[made.instances.classes[""].__module__]
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit, match=end):
        module.main()  # the module's own function is still whole


def test_a_class_inside_a_function_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    said = r"game.py:8: main\(\), before it has Counter, raised SystemExit: 2; .* serve-env game.py -- ARGUMENTS"
    with pytest.raises(EpisodeError, match=said):
        instances(tmp_path, SCRIPT, "", "--times=3")
    said = r"several classes could be it \(Counter in main\(\), B in main\(\)\): name one in the key, game.py:NAME"
    with pytest.raises(EpisodeError, match=said):
        instances(tmp_path, SCRIPT.replace("    sys.exit", "    class B: ...\n    sys.exit"))
    with pytest.raises(EpisodeError, match=r"does not define Count; it has main"):
        instances(tmp_path, SCRIPT, "Count", "--by=3")
    with pytest.raises(EpisodeError, match=r"game.py:\d+: main\(\), before it has Counter, raised IndexError"):
        instances(tmp_path, SETS, "", "1")
    assert instances(tmp_path, SETS, "Other", "1").instances.classes[""].__name__ == "Other"  # `main` has another
    with pytest.raises(EpisodeError, match=r"several classes could be it \(Counter, Other\)"):
        instances(tmp_path, SETS)

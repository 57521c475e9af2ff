"""Rules for test files: their names, their marks, and how they wait."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOMS = {path.parent.name for path in (TESTS.parent / "slurm_rlhf").glob("*/__init__.py")}
OTHERS = {"api", "gpu", "house", "kit", "lab", "runs", "support"}
"""Folders that are no room: the public face, GPU code on stand-ins, the kit for GPUs, campaigns and comparisons, whole
runs, helpers, ..."""
SUSPECT = re.compile(r"^\s*(?:from|import)\b.*(?:\btests\b|\bconftest\b|test_)", re.MULTILINE)
"""An import that may be one of a test file."""
TEXTS = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}


def imported(source: str) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_no_file_imports_from_a_test_file() -> None:
    breaches = {
        f"{path.relative_to(TESTS)} imports {module}"
        for path, text in TEXTS.items()
        if SUSPECT.search(text)
        for module in imported(text)
        if module.split(".")[-1].startswith("test_") or module.split(".")[0] in ("tests", "conftest")
    }
    assert not breaches, f"put what they share into tests/support: {sorted(breaches)}"


def test_folders_are_those_of_the_rooms() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= ROOMS | OTHERS
    assert not list(TESTS.glob("test_*.py"))


def test_every_helper_has_users() -> None:
    """A module of support/, and what it defines in public, is named somewhere else."""
    words = Counter(word for text in TEXTS.values() for word in re.findall(r"\w+", text))
    own = {path: set(re.findall(r"\w+", text)) for path, text in TEXTS.items()}
    helpers = list(TESTS.joinpath("support").glob("*.py"))
    unused = [
        path.name for path in helpers if not any(path.stem in named for other, named in own.items() if other != path)
    ]
    for path in helpers:
        for node in ast.parse(TEXTS[path]).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and words[node.name] < 2:
                unused.append(f"{path.name}: {node.name}")
    assert not unused, f"helpers that no test uses: {sorted(unused)}"


def test_docstrings_say_what_holds_and_not_which_issue_asked() -> None:
    numbered = re.compile(r"\bissue \d", re.IGNORECASE)
    found = [
        f"{path.relative_to(TESTS)}: {match[0]}" for path, text in TEXTS.items() for match in numbered.finditer(text)
    ]
    assert not found


# --- waits ------------------------------------------------------------------------------------------------------------


WAITS = {"communicate", "wait", "join", "result", "wait_for", "acquire"}
"""Methods whose first argument, or whose `timeout`, is how long they wait."""
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time"}
ALLOWED = {
    "support/waiting.py": "the one place",
    "support/open_ports.py": "how long a stranger keeps an answer from a port that may never speak",
}


def found() -> Iterator[str]:
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        if name not in ALLOWED:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (isinstance(node, ast.Call) and states_seconds(node)) or (
                    isinstance(node, ast.Assert) and reads_clock(node)
                ):
                    yield f"{name}:{node.lineno}: {ast.unparse(node)[:100]}"


def states_seconds(call: ast.Call) -> bool:
    """Whether it waits for a number of seconds, 1 or more, that stands there."""
    waits = isinstance(call.func, ast.Attribute) and call.func.attr in WAITS
    bounds = [word.value for word in call.keywords if word.arg == "timeout"] + (call.args[-1:] if waits else [])
    values = [bound.value for bound in bounds if isinstance(bound, ast.Constant)]
    return any(type(value) in (int, float) and value >= 1 for value in values)


def reads_clock(assertion: ast.Assert) -> bool:
    """Whether it compares what a clock says with a number or a constant."""
    comparisons = [node for node in ast.walk(assertion.test) if isinstance(node, ast.Compare)]
    return any(
        {node.attr for node in ast.walk(each) if isinstance(node, ast.Attribute)} & CLOCKS
        and any(isinstance(side, ast.Constant) or (isinstance(side, ast.Name) and side.id.isupper()) for side in sides)
        for each in comparisons
        for sides in [[each.left, *each.comparators]]
    )


def test_bounds_on_waits_stand_in_one_place() -> None:
    assert list(found()) == []


def test_what_it_looks_for_is_found() -> None:
    lines = [
        "done.wait(60)",
        "run(x, timeout=5)",
        "over.wait(0.1)",
        "done.wait(HANG_S)",
        "assert time.monotonic() - began < 3",
        "assert report.seconds <= time.monotonic() - began",
    ]
    nodes = [ast.parse(line).body[0] for line in lines]
    calls = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    assert [states_seconds(call) for call in calls] == [True, True, False, False]
    assert [reads_clock(node) for node in nodes if isinstance(node, ast.Assert)] == [True, False]

"""Bounds on waits stand in tests/support/waiting.py, and no assertion compares a clock with a number."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
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
    return any(isinstance(bound, ast.Constant) and is_seconds(bound.value) for bound in bounds)


def is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1


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

"""Take the program out of a response, and run the unit tests of its row against it."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import RewardError, cut
from slurm_rlhf.sandbox import unit_tests
from slurm_rlhf.sandbox.box import Limits, execute
from slurm_rlhf.wire import timeouts

Test = str | tuple[str, str]
"""Lines of Python that come behind the program, or its standard input and the output that is wanted."""

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LONGEST = 4
"""A test may take the time of all tests over this number, or over the number of tests if they are fewer."""


def code_of(response: str) -> str:
    """Return the last whole code block of a response: without a fence all of it, with an open one nothing."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else "" if "```" in response else response


def read_tests(value: Any) -> list[Test]:
    """Read the tests of a row: a list of them, `{"inputs": [...], "outputs": [...]}`, either as JSON, or one text.

    A test is a text (`assert add(1, 2) == 3`) or `{"input": ..., "output": ...}`. Raises RewardError for anything else.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):  # lines of Python may begin so
            value = json.loads(value)
    if isinstance(value, str):
        value = [value]
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        pairs = value["inputs"], value["outputs"]
        if all(isinstance(each, list) for each in pairs) and len(pairs[0]) == len(pairs[1]):
            value = [{"input": given, "output": wanted} for given, wanted in zip(*pairs, strict=True)]
    if not isinstance(value, list) or not value:
        raise RewardError(f"tests of a row are a list or a text, got {cut(repr(value), 80)} ({type(value).__name__})")
    return [_test(each, number) for number, each in enumerate(value)]


def _test(value: Any, number: int) -> Test:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("input"), str) and isinstance(value.get("output"), str):
        return value["input"], value["output"]
    raise RewardError(
        f"test {number} of a row is {cut(repr(value), 80)}; expected a text with lines of Python, or "
        '{"input": "...", "output": "..."} with standard input and output'
    )


def share_passed(response: str, tests: list[Test], kind: str, seconds: float = timeouts.SANDBOX_S) -> float:
    """Return the share of `tests` that the program in `response` passes in a sandbox, within `seconds` in all.

    Raises OSError where the sandbox cannot start.
    """
    code = code_of(response)
    if not code.strip():
        return 0.0
    order = {"code": code, "tests": tests, "seconds": seconds / min(len(tests), _LONGEST)}
    program = [sys.executable, "-IS", str(Path(unit_tests.__file__)), "{work}/code.py"]
    ended = execute(kind, program, {"code.py": code}, json.dumps(order).encode(), Limits(seconds))
    digits = ended.output[: len(ended.output) - len(ended.output.lstrip(b"01"))]
    if ended.output and not digits:  # it never began
        raise OSError(f"the {kind} sandbox did not run the tests: {cut(ended.output.decode(errors='replace'), 200)}")
    return digits.count(b"1") / len(tests)

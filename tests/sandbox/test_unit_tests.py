"""Unit tests of code that a policy wrote: what is read as a program and as a test, and what passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from waiting import scaled

from slurm_rlhf.errors import RewardError
from slurm_rlhf.sandbox import box
from slurm_rlhf.sandbox.box import chosen, code_of, read_tests, share_passed

ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (ADD, ADD),
        (f"First:\n```python\nx = 1\n```\nBetter:\n```python\n{ADD}```\nDone.", ADD),
        (f"```\n{ADD}  ```", ADD),
        (f"It is `add`:\n```py\n{ADD}", ""),
        ("", ""),
    ],
)
def test_the_last_whole_code_block_is_the_program(response: str, code: str) -> None:
    assert code_of(response) == code


@pytest.mark.parametrize(
    ("given", "tests"),
    [
        *((lines, ["assert x"]) for lines in (["assert x"], "assert x", '["assert x"]')),
        ([{"input": "1", "output": "2"}], [("1", "2")]),
        ({"inputs": ["1"], "outputs": ["2"]}, [("1", "2")]),
        ('{"inputs": ["1"], "outputs": ["2"]}', [("1", "2")]),
    ],
)
def test_lines_of_python_are_tests_and_so_are_inputs_with_their_outputs(given: Any, tests: list[Any]) -> None:
    assert read_tests(given) == tests


@pytest.mark.parametrize("given", [None, [], 3, {"inputs": ["1"], "outputs": []}, [{"input": "1"}], [4], {}, "-4.2"])
def test_other_things_are_not(given: Any) -> None:
    with pytest.raises(RewardError, match=r"expected a text with lines|are a list or a text"):
        read_tests(given)


@pytest.mark.parametrize(("tests", "seconds"), [(1, 8.0), (2, 4.0), (4, 2.0), (9, 2.0)])
def test_a_few_tests_share_the_time(monkeypatch: pytest.MonkeyPatch, tests: int, seconds: float) -> None:
    orders: list[bytes] = []
    monkeypatch.setattr(box, "execute", lambda *given: orders.append(given[3]) or box.ProgramEnd("exit", 0, b"1"))
    assert share_passed(ADD, ["assert add"] * tests, "none", 8.0) == 1 / tests
    assert json.loads(orders[0])["seconds"] == seconds


@pytest.fixture(scope="module")
def kind() -> str:
    return chosen("auto")


@pytest.mark.parametrize(
    ("code", "tests", "share"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, ["assert add(1, 2) == 3\nassert add(0, 0) == 0"], 1),
        ("a, b = map(int, input().split())\nprint(a + b)\n", [("1 2", "3\n"), ("2 2", "4"), ("2 2", "5")], 2 / 3),
        ("print('a  ')\nprint()", [("", "a")], 1),
        ("print('ä😀')", [("", "ä😀")], 1),
        ("def (", ["assert True"], 0),
        ("import os; os._exit(0)", ["assert False"], 0),
        ("raise SystemExit(0)", ["assert False"], 0),
        ("print('right'); raise SystemExit(1)", [("", "right")], 0),
        ("import json, math, re, collections, itertools", ["assert math.pi"], 1),
        ("import os; print(open(f'/proc/{os.getppid()}/fd/0').read())", [("", "wanted")], 0),
        ("while True: print('x' * 1000)", [("", "x")], 0),
        ("", ["assert True"], 0),
    ],
)
@pytest.mark.slow
def test_the_share_of_tests_that_pass(kind: str, code: str, tests: Any, share: float) -> None:
    assert share_passed(code, tests, kind, scaled(30)) == pytest.approx(share)


@pytest.mark.slow
def test_a_test_without_end_takes_no_time_from_the_next(kind: str) -> None:
    code = "import sys\ndef loop():\n    while True: pass\n"
    assert share_passed(code, ["loop()", "assert sys"], kind, scaled(10)) == 0.5


@pytest.mark.slow
def test_tests_that_are_not_reached_have_not_passed(kind: str) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ndef wait():\n    time.sleep(10**6)\n"
    assert share_passed(code, ["assert time", "wait()", "assert time"], kind, scaled(4)) == pytest.approx(1 / 3)

"""A rank answers the calls that its role declares: at once or later, and with an error where it cannot."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, cast

import pytest

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import Record
from slurm_rlhf.wire.calls import RankCalls
from slurm_rlhf.wire.codec import call, decode, encode
from slurm_rlhf.wire.messages import Request

CALLS = "add, add_later, fail, memory, shutdown, stacks"


class Sum(Record):
    numbers: list[int]


class AddingCalls(RankCalls, Protocol):
    @call(deadline="forward")
    def add(self, request: Sum) -> int:
        """Add up."""

    @call(deadline="forward")
    def add_later(self, request: Sum) -> Future[int]:
        """Add up, and answer later."""

    @call(deadline="forward")
    def fail(self) -> None:
        """Raise an error."""

    def hidden(self) -> int:
        return 1


class Adding(Worker, AddingCalls):
    def add(self, request: Sum) -> int:
        return sum(request.numbers)

    def add_later(self, request: Sum) -> Future[int]:
        self.later: Future[Any] = Future()
        return self.later

    def fail(self) -> None:
        raise ModelError("no such model")


class Asked:
    """A request, and what was answered to it."""

    def __init__(self, worker: Worker, method: str, args: dict[str, Any]) -> None:
        self.answers: list[tuple[str, Any]] = []
        worker.handle(Request(method, encode(args), 1, self._send))

    def _send(self, kind: str, frames: Any, call: int) -> None:
        self.answers.append((kind, decode([memoryview(frame) for frame in frames])))


@pytest.fixture
def worker() -> Adding:
    return Adding(Config(), RankInfo("adder", 0, 1, 0, "n"), cast(Any, None))


def test_a_declared_call_is_answered_with_the_result_of_its_implementation(worker: Adding) -> None:
    assert Asked(worker, "add", {"numbers": [1, 2, 3]}).answers == [("reply", 6)]
    assert Asked(worker, "shutdown", {}).answers == [("reply", "done")]


def test_what_is_not_declared_or_of_another_type_is_refused_by_name(worker: Adding) -> None:
    for method in ("hidden", "handle", "nothing"):
        [(kind, failure)] = Asked(worker, method, {}).answers
        assert (kind, failure["type"], failure["message"]) == ("error", "KeyError", repr(method))
    [(_, failure)] = Asked(worker, "add", {"numbers": [1], "no": 1}).answers
    assert failure["type"] == "WireError"
    assert failure["message"] == "the argument of add does not decode: Object contains unknown field `no`"


def test_what_an_implementation_raises_goes_to_the_caller(worker: Adding) -> None:
    [(kind, failure)] = Asked(worker, "fail", {}).answers
    assert (kind, failure["type"], failure["message"]) == ("error", "ModelError", "no such model")
    assert failure["user_error"]


@pytest.mark.parametrize(
    ("outcome", "kind", "stated"),
    [(6, "reply", "6"), (ValueError("too late"), "error", "too late"), (object(), "error", "cannot be sent")],
    ids=["result", "error", "unsendable"],
)
def test_a_call_may_be_answered_later(worker: Adding, outcome: Any, kind: str, stated: str) -> None:
    asked = Asked(worker, "add_later", {"numbers": [1]})
    assert asked.answers == []
    if isinstance(outcome, Exception):
        worker.later.set_exception(outcome)
    else:
        worker.later.set_result(outcome)
    [(found, answer)] = asked.answers
    assert found == kind
    assert stated in str(answer)

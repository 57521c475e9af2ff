"""An engine takes new weights behind the responses in flight, or under them. The engine itself is scripted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from sampled_responses import response

from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine.engine import Status
from slurm_rlhf.errors import RunError
from slurm_rlhf.ranks.engine_leader import EngineLeader
from slurm_rlhf.ranks.worker import RankInfo
from slurm_rlhf.records import LENGTH, Sampling, SyncReport, Trajectory, VersionSpan
from slurm_rlhf.wire.calls import Asked, GenerateBatch, PackedPrompts
from slurm_rlhf.wire.codec import decode, encode
from slurm_rlhf.wire.messages import Request


class Call:
    """A request as the role sees it."""

    def __init__(self, method: str, argument: Any) -> None:
        self.method = method
        self.argument = partial(decode, encode(argument))
        self.answer: Any = None

    def reply(self, answer: Any) -> None:
        self.answer = answer

    def fail(self, error: Exception) -> None:
        self.answer = error

    def answer_with(self, work: Callable[[], Any]) -> None:
        Request.answer_with(self, work)  # type: ignore[arg-type]


class Scripted:
    """Three tokens for each request, marked with the version they were sampled under."""

    def __init__(self) -> None:
        self.version = 0
        self.failing = False
        self.tokens: dict[str, list[int]] = {}

    @property
    def status(self) -> Status:
        return Status(self.version, len(self.tokens), 0, 0, 0.0, "")

    def add(self, request: Any) -> None:
        if request.key in self.tokens:
            raise RunError(f"request key {request.key!r} is in use")
        self.tokens[request.key] = []

    def drop(self) -> None:
        self.tokens.clear()

    def load(self, weights: Any, version: int) -> None:
        self.version = version

    def step(self) -> list[Trajectory]:
        if self.failing:
            self.failing = False
            raise RunError("the forward pass failed")
        landed = []
        for key, versions in list(self.tokens.items()):
            versions.append(self.version)
            if len(versions) == 3:
                del self.tokens[key]
                landed.append(_trajectory(key, versions))
        return landed


class Arrived:
    """The sync end of a role whose weights are there, after so many updates that break off."""

    def __init__(self, broken: int = 0) -> None:
        self.broken = broken

    def receive(self, version: int, load: Any) -> SyncReport:
        self.broken -= 1
        if self.broken >= 0:
            return SyncReport(broken="somebody died")
        load(iter([]), version)
        return SyncReport()


def _trajectory(key: str, versions: list[int]) -> Trajectory:
    spans = [
        VersionSpan(i, i + versions.count(version), version)
        for i, version in enumerate(versions)
        if versions.index(version) == i
    ]
    return response(7, "", int(key), tokens=3, finish_reason=LENGTH, versions=spans, key=key)


def make_role(mode: str, broken: int = 0) -> EngineLeader:
    config = Config()
    config.vllm.sync_mode = mode  # type: ignore[assignment]
    role = EngineLeader(config, RankInfo("rollout", 0, 1, 0, "n"), None)  # type: ignore[arg-type]
    role.engine, role.sync = Scripted(), Arrived(broken)  # type: ignore[assignment]
    return role


def ask(role: EngineLeader) -> Call:
    """Two responses, and the first token of each."""
    token_ids = np.array([1], dtype=np.int32)
    packed = PackedPrompts.pack([Asked(sample, 7, sample, 0, 0, 3, token_ids) for sample in (0, 1)])
    asked = Call(
        "generate",
        GenerateBatch(packed, Sampling(max_new_tokens=3), run_seed=1, least=2),
    )
    role.handle(asked)
    role.advance()
    return asked


def versions_of(asked: Call) -> list[list[int]]:
    """List the version of each token of each response."""
    found = [trajectory.versions for trajectory in asked.answer.found]
    return [[span.version for span in spans for _ in range(span.start, span.end)] for spans in found]


@pytest.mark.parametrize(("mode", "versions"), [("drain", [0, 0, 0]), ("inflight", [0, 1, 1])])
def test_responses_in_flight_when_weights_come(mode: str, versions: list[int]) -> None:
    role = make_role(mode)
    asked = ask(role)
    weights = Call("sync_receive", 1)
    role.handle(weights)
    assert (weights.answer is None) == (mode == "drain")
    while role.busy():
        role.advance()
    assert weights.answer == SyncReport()
    assert role.engine.status.version == 1
    assert versions_of(asked) == [versions, versions]


def test_responses_wait_while_an_update_that_broke_off_is_repeated() -> None:
    role = make_role("inflight", broken=1)
    asked = ask(role)
    first, again = (Call("sync_receive", 1) for _ in range(2))
    role.handle(first)
    assert first.answer == SyncReport(broken="somebody died")
    assert not role.busy()  # so the worker waits for calls instead of stepping an engine without usable weights
    role.advance()
    role.handle(again)
    assert role.busy()
    while role.busy():
        role.advance()
    assert versions_of(asked) == [[0, 1, 1], [0, 1, 1]]


def test_a_step_that_fails_leaves_no_request_in_the_engine() -> None:
    """The same prompts may be asked for again: nobody waits for what the engine had of them."""
    role = make_role("drain")
    role.engine.failing = True
    failed = ask(role)
    assert "the forward pass failed" in str(failed.answer)
    assert not role.busy()
    again = ask(role)
    while role.busy():
        role.advance()
    assert versions_of(again) == [[0, 0, 0], [0, 0, 0]]


def test_what_nobody_wants_any_more_is_dropped_and_holds_no_update() -> None:
    role = make_role("drain")
    unwanted = ask(role)
    weights, dropped = Call("sync_receive", 1), Call("drop", None)
    role.handle(weights)
    assert weights.answer is None
    role.handle(dropped)
    assert "had to drop its requests" in str(unwanted.answer)
    assert weights.answer == SyncReport()
    again = ask(role)
    while role.busy():
        role.advance()
    assert versions_of(again) == [[1, 1, 1], [1, 1, 1]]


def fetch(role: EngineLeader, least: int = 1) -> Call:
    """Ask for nothing: the call comes for what others have asked for."""
    call = Call("generate", GenerateBatch(PackedPrompts.pack([]), Sampling(), 1, least))
    role.handle(call)
    return call


def test_calls_are_answered_in_their_order_once_enough_has_finished_or_nothing_is_left() -> None:
    role = make_role("drain")
    token_ids = np.array([1], dtype=np.int32)

    def more(number: int, least: int) -> Call:
        asked = PackedPrompts.pack([Asked(number, 7, number, 0, 0, 3, token_ids)])
        call = Call("generate", GenerateBatch(asked, Sampling(), 1, least))
        role.handle(call)
        role.advance()
        return call

    first, second, third = more(0, 2), more(1, 1), more(2, 1)  # a response is finished, and the first call wants two
    assert (first.answer, second.answer) == (None, None)
    role.advance()
    assert [one.key for one in first.answer.found] == ["0", "1"]
    assert (second.answer, third.answer) == (None, None)
    role.advance()
    assert [one.key for one in second.answer.found] == ["2"]
    assert third.answer.found == []  # nothing is left, so nobody waits
    assert fetch(role).answer.found == []


def test_a_failure_while_no_call_is_there_fails_the_next_one() -> None:
    role = make_role("drain")
    ask(role)
    role._calls.clear()
    role.engine.failing = True
    role.advance()
    assert "the forward pass failed" in str(fetch(role).answer)
    assert fetch(role).answer.found == []

"""Waiting when a weight update breaks off: an engine that hangs is given up, and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from waiting import HANG_S

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RoleDied, SyncBroken, SyncError
from slurm_rlhf.records import SyncReport
from slurm_rlhf.weights import update
from slurm_rlhf.weights.backends import TransportFailure
from slurm_rlhf.weights.diagnosis import Diagnosis
from slurm_rlhf.weights.ends import ActorEnd
from slurm_rlhf.weights.group import SyncGroup
from slurm_rlhf.weights.lead import EngineLost, WeightSync, _end_forming, _Transfer, settle_update
from slurm_rlhf.wire import timeouts

BROKEN = SyncReport(broken="rank 3 is silent", silent=True)


class Engines:
    """Stands in for the engines' handle: an engine that is given up is lost, and its call fails."""

    def __init__(self, calls: dict[int, Future[Any]]) -> None:
        self.calls = calls
        self.given_up: dict[int, str] = {}

    def give_up(self, engine: int, why: str) -> None:
        self.given_up[engine] = why
        self.calls[engine].set_exception(RoleDied(why))

    def call(self, engine: int, call: object, request: object) -> Future[Any]:
        return self.calls[engine]

    def goes_on_without(self, engine: int, error: BaseException) -> bool:
        return isinstance(error, RoleDied)


def answered(report: SyncReport) -> Future[Any]:
    call: Future[Any] = Future()
    call.set_result(report)
    return call


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "TRANSFER_SLOW_S", 0.3)


def settle(engines: Engines, actor: list[Future[Any]]) -> list[BaseException]:
    calls = {call: engine for engine, call in engines.calls.items()}
    return raised_by(lambda: settle_update(engines, actor, calls))  # type: ignore[arg-type]


def raised_by(work: Callable[[], object]) -> list[BaseException]:
    """Run `work` and return its errors; AssertionError where it waits for longer than it may."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except EngineLost as lost:
            raised.append(lost)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    return raised


def test_an_engine_that_stands_still_is_not_waited_for_and_the_others_go_on() -> None:
    engines = Engines({0: answered(BROKEN), 1: Future()})
    (lost,) = settle(engines, [answered(BROKEN), answered(BROKEN)])
    assert list(engines.given_up) == [1]
    assert "it hangs in a weight update that broke off" in str(lost)


class Actor:
    """Stands in for the actor's handle: its ranks let go of the update."""

    def start_all(self, call: object, request: object) -> list[Future[Any]]:
        return [answered(BROKEN), answered(BROKEN)]


def test_an_update_of_a_run_does_not_wait_for_an_engine_that_stands_still() -> None:
    engines = Engines({3: answered(BROKEN), 5: Future()})
    sync = WeightSync(Config(), Actor(), engines, "node1")  # type: ignore[arg-type]
    sync.engines = [3, 5]
    (lost,) = raised_by(lambda: sync.update(7))
    assert list(engines.given_up) == [5]
    assert "it hangs in a weight update that broke off" in str(lost)


def test_an_update_that_is_always_cut_off_is_repeated_and_then_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(WeightSync, "connect", lambda sync, parameters, engines: joined.append(engines))
    monkeypatch.setattr(WeightSync, "_join", lambda sync: joined.append("fallback"))
    config = Config()
    for config.sync.fallback, ways in (("none", [[]]), ("gloo", [[], "fallback"])):
        with pytest.raises(SyncError, match=r"^rank 3 is silent$"):
            WeightSync(config, Actor(), Engines({}), "node1").update(7)  # type: ignore[arg-type]
        assert joined == ways
        joined.clear()


def test_an_actor_rank_reports_that_an_update_broke_off() -> None:
    """It raises nothing: the run may do the same over a new group."""
    end: Any = ActorEnd(Config(), "actor 0")
    end._sender = SimpleNamespace(push=mock.Mock(side_effect=SyncBroken(BROKEN.broken, hang=True)))
    assert end.push({}, 7) == BROKEN


def test_an_update_took_as_long_as_its_slowest_member_for_checksums() -> None:
    reports = [SyncReport(checksum_s=seconds, nbytes=8, seconds=2.0) for seconds in (0.1, 0.4, 0.2)]
    actor: Any = SimpleNamespace(start_all=lambda call, request: [answered(report) for report in reports[:2]])
    sync = WeightSync(Config(), actor, Engines({0: answered(reports[2])}), "node1")  # type: ignore[arg-type]
    sync.engines = [0]
    metrics = sync.update(7)
    assert metrics["time/sync_checksum"] == 0.4
    assert metrics["time/sync_transfer"] == 2.0
    assert metrics["perf/sync_bytes"] == 8.0


def test_a_member_of_an_update_that_was_cut_off_leaves_its_group_with_the_verdict() -> None:
    done: list[Any] = []
    group: Any = SimpleNamespace(
        board=SimpleNamespace(
            post=lambda text, lost: done.append(("post", text, lost)),
            verdict=lambda: Diagnosis("rollout 1 is gone", silent=True),
        ),
        drop=lambda: done.append("drop"),
        abort=lambda text, known=False: done.append(("abort", text, known)),
        ended="",
        quiet={},
        me="actor 0",
    )
    error = update._broken(group, 3, TransportFailure("connection reset", peer_left=True))
    assert done == [("post", "", "connection reset"), "drop", ("abort", "rollout 1 is gone", True)]
    assert "policy version 3 did not get through at actor 0: rollout 1 is gone" in str(error)


@pytest.mark.parametrize("let_go", [False, True])
def test_nobody_is_given_up_before_its_time_or_while_an_actor_rank_has_not_let_go(
    monkeypatch: pytest.MonkeyPatch, let_go: bool
) -> None:
    actor: Future[Any] = answered(BROKEN) if let_go else Future()
    monkeypatch.setattr(timeouts, "TRANSFER_SLOW_S", HANG_S if let_go else 0.3)
    engines = Engines({0: answered(BROKEN), 1: Future()})
    threading.Timer(1.0, lambda: (engines.calls[1].set_result(BROKEN), let_go or actor.set_result(BROKEN))).start()
    assert settle(engines, [actor]) == []
    assert engines.given_up == {}


def test_an_update_that_went_through_is_waited_for() -> None:
    engines = Engines({0: Future()})
    threading.Timer(1.0, engines.calls[0].set_result, (SyncReport(),)).start()
    assert settle(engines, [answered(SyncReport())]) == []
    assert engines.given_up == {}


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "GROUP_MARGIN_S", 0.05)
    group: Any = SimpleNamespace(timeout_s=0.1, board=SimpleNamespace(refusal=str), ended="", name="g")
    over = threading.Event()
    with pytest.raises(SyncError, match=r"group g: rank 1 did not come within 0\.1 s"):
        SyncGroup.wait_for(group, lambda: over.wait(HANG_S), "rank 1")
    over.set()


def test_a_group_that_lost_an_engine_while_it_formed_is_aborted_until_its_leader_has_begun() -> None:
    leader, asked = mock.Mock(), _Transfer(Engines({}), [], {}, lost={0: RoleDied("gone")})  # type: ignore[arg-type]
    for waited in (0.1, 0.2, timeouts.TRANSFER_ABORT_S + 0.1):
        _end_forming(leader, asked, waited)
    assert leader.call.call_count == 2

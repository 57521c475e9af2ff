"""The links between the ranks of an engine: leader and followers, the local stream, and pending responses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Client
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from msgspec.structs import replace
from waiting import HANG_S

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.tp_engine import EnginePlace
from slurm_rlhf.errors import CallTimeout, RoleDied, RunError, WireError
from slurm_rlhf.ranks.engine_follower import LEADER_ADDRESS, EngineFollower, read_address
from slurm_rlhf.ranks.follower_links import (
    FollowerAnswer,
    FollowerCalls,
    FollowerLinks,
    LeaderMessage,
    LocalListener,
    LocalStream,
)
from slurm_rlhf.records import ParameterSpec, Sampling, SyncConnection, SyncReport
from slurm_rlhf.wire.calls import RankCalls, SyncGroupRequest, WakeUpRequest
from slurm_rlhf.wire.codec import CallSpec, calls_of, read
from slurm_rlhf.wire.messages import Request

REQUEST = GenerateRequest("7.1", 7, 1, np.arange(5, dtype=np.int32), Sampling(max_new_tokens=4), 3)
GROUP = SyncGroupRequest("sync1", 2, 5, 2, "n1", 29500, [ParameterSpec("weight", [2, 3], "float32")])
TRAVELLING: dict[str, tuple[Any, Any]] = {
    "add": (REQUEST, None),
    "check": (None, b"digest"),
    "sync_join": (GROUP, SyncConnection("gloo", "eth0", "10.0.0.1", "n1", 1000)),
    "sync_receive": (4, SyncReport(nbytes=8)),
    "wake_up": (WakeUpRequest("kv_cache"), None),
}
"""Command -> argument and result, where it has them."""


class Links:
    """A leader with two followers, which the test plays."""

    def __init__(self, timeout: Timeout) -> None:
        listener = LocalListener(2)
        self.followers: list[LocalStream] = []
        for rank in (1, 2):
            self.followers.append(LocalStream(Client(listener.path)))
            self.followers[-1].send(rank)
        self.failures: SimpleQueue[str] = SimpleQueue()
        place = EnginePlace(0, 0, 3, "here")
        self.leader = FollowerLinks(place, listener.accept_all(place, 5), timeout, self.failures.put)

    def stated(self) -> LeaderMessage:
        """The next message, which both got."""
        one, other = (read(LeaderMessage, follower.receive(), "it") for follower in self.followers)
        assert one.number == other.number
        assert one.name == other.name
        return one

    def answer(self, *answers: Any) -> None:
        for follower, answer in zip(self.followers, answers, strict=True):
            follower.send(answer)


def argument_of(stated: LeaderMessage, spec: CallSpec) -> Any:
    return read(spec.argument, stated.argument, "it")


@pytest.fixture
def links() -> Links:
    return Links(Timeout(collective=1.0))


def test_every_command_travels(links: Links) -> None:
    """With its argument there and its result back; four are not answered."""
    for number, (name, spec) in enumerate(calls_of(FollowerCalls).items(), start=1):
        argument, result = TRAVELLING.get(name, (None, None))
        links.leader.send(getattr(FollowerCalls, name), *filter(None, [argument]))
        stated = links.stated()
        assert (stated.name, stated.number) == (name, number)
        arrived = argument_of(stated, spec) if spec.argument else None
        assert repr(arrived) == repr(argument)
        assert (spec.deadline is None) == (name in {"add", "step", "drop", "leave"})
        if spec.deadline is not None:
            links.answer(*[FollowerAnswer("done", number, result)] * 2)
            assert links.leader.finish(getattr(FollowerCalls, name)) == [result] * 2
    assert set(TRAVELLING) <= set(calls_of(FollowerCalls))


def test_a_group_is_described_without_parameters_and_without_what_the_configuration_says() -> None:
    where = {"name": "sync1", "rank": 2, "world": 5, "actors": 2, "host": "n1", "port": 29500}
    assert GROUP.described() == where
    assert replace(GROUP, backend="gloo").described() == where | {"backend": "gloo"}


def test_a_request_comes_whole(links: Links) -> None:
    links.leader.send(FollowerCalls.add, REQUEST)
    stated = links.stated()
    assert not stated.leaving
    got = argument_of(stated, calls_of(FollowerCalls)["add"])
    assert got.prompt_ids.tolist() == [0, 1, 2, 3, 4]
    assert replace(got, prompt_ids=REQUEST.prompt_ids) == REQUEST
    links.leader.send(FollowerCalls.leave)
    stated = links.stated()
    assert (stated.number, stated.leaving) == (2, True)


def test_answers_are_records(links: Links) -> None:
    links.leader.send(FollowerCalls.sync_receive, 4)
    assert argument_of(links.stated(), calls_of(FollowerCalls)["sync_receive"]) == 4
    links.answer(
        FollowerAnswer("done", 1, SyncReport(nbytes=8)),
        FollowerAnswer("done", 1, SyncReport(broken="the link was cut")),
    )
    reports = links.leader.finish(FollowerCalls.sync_receive)
    assert reports == [SyncReport(nbytes=8), SyncReport(broken="the link was cut")]


def test_an_answer_of_another_type_is_refused_by_name(links: Links) -> None:
    links.leader.send(FollowerCalls.sync_receive, 4)
    links.answer(FollowerAnswer("done", 1, {"broke": ""}), FollowerAnswer("done", 1, SyncReport()))
    with pytest.raises(WireError, match=r"^the result of sync_receive is not what .* unknown field `broke`"):
        links.leader.finish(FollowerCalls.sync_receive)


def test_what_is_no_answer_ends_the_engine(links: Links) -> None:
    links.followers[1].send(["perhaps", 1, None])
    assert "the answer of a follower is not what is declared: Invalid enum value 'perhaps'" in links.failures.get(
        timeout=HANG_S
    )
    with pytest.raises(RunError, match="rank 2 died"):
        links.leader.send(FollowerCalls.step)


def test_answers_to_earlier_commands_are_passed_over_and_failures_named(links: Links) -> None:
    links.leader.send(FollowerCalls.sleep)
    links.leader.send(FollowerCalls.wake_up, WakeUpRequest("weights"))
    links.answer(FollowerAnswer("done", 1, None), FollowerAnswer("done", 1, None))
    links.answer(FollowerAnswer("done", 2, None), FollowerAnswer("failed", 2, "RunError: no memory is free"))
    with pytest.raises(RunError, match=r"engine 0 .*: its rank 2 failed: RunError: no memory is free"):
        links.leader.finish(FollowerCalls.wake_up)


def test_ranks_that_have_done_other_things_stop_the_engine(links: Links) -> None:
    for follower in links.followers:
        follower.send(FollowerAnswer("done", 1, b"same"))
    links.leader.agree(b"same", 3)
    links.answer(FollowerAnswer("done", 2, b"same"), FollowerAnswer("done", 2, b"else"))
    with pytest.raises(RunError, match=r"\(TP ranks 0 and 2\) did not do the same up to batch 4"):
        links.leader.agree(b"same", 4)
    assert "up to batch 4" in links.failures.get(timeout=HANG_S)


def test_a_silent_follower_is_waited_for_as_long_as_its_call_may_take(links: Links) -> None:
    with pytest.raises(CallTimeout, match=r"its rank 1 did not follow within 1 s"):
        links.leader.agree(b"same", 1)


def test_the_conductor_cannot_call_what_the_leader_can() -> None:
    """A step that one rank alone takes would stop the engine."""
    follower = EngineFollower.__new__(EngineFollower)
    assert set(calls_of(FollowerCalls)) <= set(dir(follower))
    assert set(calls_of(EngineFollower)) == set(calls_of(RankCalls))
    assert not set(calls_of(RankCalls)) & set(calls_of(FollowerCalls))
    sent: list[Any] = []
    follower.config, follower.info = Config(), type("Info", (), {"role": "rollout"})()
    follower.handle(Request("step", [], 1, lambda kind, frames, call: sent.append(kind)))
    assert sent == ["error"]


def test_a_rank_waits_for_its_leader_as_long_as_it_says() -> None:
    waits = []

    class Store(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
            waits.append((keys, timeout))
            super().wait(keys, timeout)

    store = Store()
    store.set(LEADER_ADDRESS, '["path", "identity"]')
    assert read_address(store, 1.5) == ("path", "identity")
    assert waits == [([LEADER_ADDRESS], timedelta(seconds=1.5))]


# --- local stream -----------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[LocalListener]:
    made = LocalListener(4)
    yield made
    made.close()


def test_a_follower_knows_that_it_is_to_leave_before_it_comes_to_that() -> None:
    follower: Any = SimpleNamespace(_leaving=False, _frames=SimpleQueue())
    EngineFollower._take(follower, [1, "leave", None])
    assert follower._leaving


def test_messages_arrive_whole_and_in_order(listener: LocalListener) -> None:
    one = LocalStream(Client(listener.path))
    one.send(1)
    other = listener.accept_all(EnginePlace(0, 0, 2, "here"), HANG_S)[1]
    heard: SimpleQueue[Any] = SimpleQueue()
    other.listen(heard.put, heard.put)
    large = np.arange(3_000_000, dtype=np.float32)
    for number in range(50):
        one.send([number, {"name": "x" * number, "array": np.arange(number)}])
    one.send(large)
    for number in range(50):
        got, content = heard.get(timeout=HANG_S)
        assert got == number
        assert content["array"].tolist() == list(range(number))
    assert np.array_equal(heard.get(timeout=HANG_S), large)
    other.send("back")
    assert one.receive() == "back"


def test_the_end_of_the_other_process_is_noticed_at_once(listener: LocalListener) -> None:
    child = os.fork()
    if child == 0:
        stream = LocalStream(Client(listener.path))
        stream.send(1)
        time.sleep(60)
        os._exit(0)
    stream = listener.accept_all(EnginePlace(0, 0, 2, "here"), HANG_S)[1]
    ended: SimpleQueue[Exception] = SimpleQueue()
    stream.listen(lambda _: None, ended.put)
    os.kill(child, 9)
    error = ended.get(timeout=HANG_S)
    os.waitpid(child, 0)
    assert isinstance(error, RoleDied)
    assert str(error) == "the process is gone: it closed its end"
    with pytest.raises(RoleDied):
        stream.send("anybody?")


def test_only_this_user_enters_the_directory(listener: LocalListener) -> None:
    assert os.stat(os.path.dirname(listener.path)).st_mode & 0o777 == 0o700


def test_everybody_is_awaited_and_the_missing_are_named(listener: LocalListener) -> None:
    def come(number: int) -> None:
        LocalStream(Client(listener.path)).send(number)

    for number in (3, 1):
        threading.Thread(target=come, args=(number,)).start()
    with pytest.raises(CallTimeout, match=r"rank \[2\] did not connect within 0.5 s"):
        listener.accept_all(EnginePlace(0, 0, 4, "here"), 0.5)
    assert not os.path.exists(listener.path)

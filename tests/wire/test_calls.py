"""Calls to processes of their own: replies, errors, deadlines, many at once, large ones."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_peer import INTERVAL, ask, received, start_peer, stop_peer
from waiting import HANG_S, scaled

from slurm_rlhf.errors import CallTimeout, RemoteError, RoleDied, RunError, WireError
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Peer

# Nobody is meant to be lost here, however busy the machine is.
LIMIT = HANG_S


class Team:
    """A conductor's end and two actor processes."""

    def __init__(self, directory: Path) -> None:
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.lost: list[Peer] = []
        key_file = directory / "keys.json"
        self.keys = RunKeys.create(key_file)
        self.server = ControlServer(
            self.keys,
            heartbeat_interval=INTERVAL,
            heartbeat_limit=LIMIT,
            on_lost=self.lost.append,
            on_event=lambda peer, name, data: self.events.append((peer.rank, name, data)),
        )
        self.processes = [start_peer(self.server.endpoint(), key_file, "actor", rank, 2, LIMIT) for rank in range(2)]

    def call(self, method: str, rank: int = 0, timeout_s: float = HANG_S, **args: Any) -> Any:
        return ask(self.server, "actor", rank, method, timeout_s=timeout_s, **args).result(HANG_S)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    made = Team(tmp_path_factory.mktemp("team"))
    try:
        made.server.wait_for("actor", 2, HANG_S)
        yield made
        assert made.lost == []
        assert (made.server.garbage, made.server.replayed, made.server.auth.refused) == (0, 0, 0)
    finally:
        made.server.close()
        for process in made.processes:
            stop_peer(process)


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys.create(tmp_path / "keys.json")


def test_the_ranks_introduce_themselves(team: Team) -> None:
    peers = team.server.wait_for("actor", 2, HANG_S)
    assert [(peer.role, peer.rank, peer.world, peer.pid) for peer in peers] == [
        ("actor", rank, 2, process.pid) for rank, process in enumerate(team.processes)
    ]


def test_arguments_and_results_travel(team: Team) -> None:
    assert team.call("echo", 1, text="x", numbers=[1, 2.5, None], nested={"a": {3: True}}) == {
        "text": "x",
        "numbers": [1, 2.5, None],
        "nested": {"a": {3: True}},
    }
    names = {"role": "r", "rank": 5, "method": "m", "self": 1}
    assert ask(team.server, "actor", 0, "echo", timeout_s=HANG_S, **names).result(HANG_S) == names
    array = np.arange(100_000, dtype=np.float32)
    doubled = team.call("double", array=array)["array"]
    assert np.array_equal(doubled, array * 2)
    assert doubled.flags.aligned
    doubled += 1


def test_arrays_may_change_as_soon_as_they_are_handed_over(keys: RunKeys) -> None:
    with ControlServer(keys) as server, ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
        client.connect(HANG_S)
        array = np.ones(5_000_000)
        future = ask(server, "actor", 0, "double", timeout_s=HANG_S, array=array)
        array[:] = -1
        request = received(client)
        arrived = request.argument()["array"]
        assert arrived.min() == 1
        request.reply(arrived)
        arrived[:] = -2
        assert future.result(HANG_S).min() == 1


@pytest.mark.slow
def test_two_ranks_work_at_the_same_time(team: Team) -> None:
    long = ask(team.server, "actor", 0, "sleep", timeout_s=HANG_S, seconds=scaled(1.5))
    assert team.call("echo", 1, a=1) == {"a": 1}
    assert not long.done()
    assert long.result(HANG_S) == "slept"


def test_many_outstanding_calls_are_answered_in_order(team: Team) -> None:
    futures = [ask(team.server, "actor", n % 2, "echo", timeout_s=HANG_S, n=n) for n in range(4000)]
    assert [future.result(HANG_S)["n"] for future in futures] == list(range(4000))


def test_calls_from_many_threads(team: Team) -> None:
    def work(offset: int) -> list[int]:
        return [team.call("echo", rank=offset % 2, n=offset + n)["n"] for n in range(50)]

    offsets = range(0, 8000, 1000)
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(work, offsets)] == [[*range(offset, offset + 50)] for offset in offsets]


def test_events_arrive_in_order_before_the_reply(team: Team) -> None:
    team.events.clear()
    team.call("announce", 1, times=300)
    assert team.events == [(1, "progress", {"number": number}) for number in range(300)]


def test_a_remote_exception_is_raised_here(team: Team) -> None:
    with pytest.raises(RemoteError, match=r"raise failed on actor rank 1 on .*KeyError: 'missing'") as caught:
        team.call("raise", 1, user=False)
    assert 'raise RewardError("reward.py' in caught.value.remote_traceback
    assert not caught.value.user_error
    with pytest.raises(RemoteError) as caught:
        team.call("raise", user=True)
    assert str(caught.value) == "reward.py returned NaN at index 3"
    assert caught.value.user_error
    assert caught.value.exit_code == 2


def test_what_cannot_be_encoded_is_an_error_on_either_side(team: Team) -> None:
    with pytest.raises(WireError, match="object"):
        team.call("echo", bad=object())
    with pytest.raises(RemoteError, match=r"WireError: a builtins\.object cannot be sent"):
        team.call("unsendable")
    assert team.call("echo", a=1) == {"a": 1}


@pytest.mark.slow
def test_a_passed_deadline_names_everything_and_the_late_reply_is_dropped(team: Team) -> None:
    late = team.server.late
    peer = team.server.peers("actor")[1]
    with pytest.raises(CallTimeout) as caught:
        team.call("sleep", 1, timeout_s=0.5, seconds=1.2)
    for part in ("actor rank 1", peer.host, f"pid {peer.pid}", "sleep", "0.5 s", "phase 'sleep'"):
        assert part in str(caught.value)
    assert team.call("echo", 1, a=2) == {"a": 2}
    assert team.server.late == late + 1


@pytest.mark.slow
def test_a_deadline_counts_from_the_last_reply_of_a_rank_that_works_its_calls_off(team: Team) -> None:
    futures = [ask(team.server, "actor", 0, "sleep", timeout_s=scaled(1.6), seconds=scaled(0.4)) for _ in range(6)]
    assert [future.result(HANG_S) for future in futures] == ["slept"] * 6


def test_a_rank_that_is_not_there(team: Team) -> None:
    with pytest.raises(RoleDied, match="actor rank 2 is not connected; connected ranks of actor: 0, 1"):
        team.call("echo", 2)
    with pytest.raises(RoleDied, match="connected ranks of critic: none"):
        ask(team.server, "critic", 0, "echo", timeout_s=1).result(HANG_S)
    with pytest.raises(CallTimeout, match=r"actor: 2 of 4 ranks said hello within 0\.2 s; missing: 2, 3"):
        team.server.wait_for("actor", 4, 0.2)


@pytest.mark.slow
def test_heartbeats_overtake_large_arrays(team: Team) -> None:
    size, count = 100_000_000, 4
    peer = team.server.peers("actor")[0]
    heard = {peer.heard}
    futures = [ask(team.server, "actor", 0, "zeros", timeout_s=HANG_S, bytes=size) for _ in range(count - 1)]
    futures += [ask(team.server, "actor", 0, "double", timeout_s=HANG_S, array=np.ones(size, np.uint8))]
    while not all(future.done() for future in futures):
        time.sleep(0.01)
        heard.add(peer.heard)
    assert [future.result().nbytes for future in futures[:-1]] == [size] * (count - 1)
    assert futures[-1].result()["array"].sum() == 2 * size
    # In the line with the arrays they would all come at the end, with the last answer.
    assert len(heard) >= 3


@pytest.mark.slow
def test_heartbeats_go_on_while_the_rank_computes(team: Team) -> None:
    peer = team.server.peers("actor")[1]
    busy = ask(team.server, "actor", 1, "compute", timeout_s=HANG_S, seconds=1.5)
    heard = set()
    while not busy.done():
        heard.add(peer.heard)
        time.sleep(0.02)
    assert busy.result() == "computed"
    assert len(heard) >= 4


def test_looking_for_calls_starts_no_wait_and_asks_no_socket(team: Team) -> None:
    with ControlClient(team.server.endpoint(), team.keys, "rollout", 0, 1) as client:
        client.connect(HANG_S)
        assert client.receive(0) is None
        calls: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, argument: calls.update([event]) if event.endswith("call") else None)
        try:
            assert [client.receive(0) for _ in range(1000)] == [None] * 1000
        finally:
            sys.setprofile(None)
        assert calls.total() < 20 * 1000
        future = ask(team.server, "rollout", 0, "generate", timeout_s=HANG_S, n=1)
        request = received(client)
        assert (request.method, request.argument()) == ("generate", {"n": 1})
        request.reply("done")
        assert future.result(HANG_S) == "done"
        with pytest.raises(RunError, match="answered already"):
            request.reply("again")


def test_a_rank_that_leaves_is_not_lost_but_cannot_be_called(keys: RunKeys) -> None:
    lost: list[Peer] = []
    with ControlServer(keys, on_lost=lost.append) as server:
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.connect(HANG_S)
            future = ask(server, "actor", 0, "train_step", timeout_s=HANG_S)
        with pytest.raises(RoleDied, match="it said goodbye"):
            future.result(HANG_S)
        with pytest.raises(RoleDied, match="it said goodbye"):
            server.wait_for("actor", 1, HANG_S)
        assert lost == []
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.connect(HANG_S)
            assert not server.wait_for("actor", 1, HANG_S)[0].lost


def test_a_failed_role_fails_everything_of_it_at_once_and_nothing_else(keys: RunKeys) -> None:
    with ControlServer(keys) as server, ControlClient(server.endpoint(), keys, "actor", 0, 2) as actor:
        with ControlClient(server.endpoint(), keys, "critic", 0, 1) as critic:
            actor.connect(HANG_S)
            critic.connect(HANG_S)
            pending = ask(server, "actor", 0, "train_step", timeout_s=HANG_S)
            other = ask(server, "critic", 0, "values", timeout_s=HANG_S)
            threading.Timer(0.3, server.fail_role, ("actor", RoleDied("actor rank 1 exited with code 9"))).start()
            with pytest.raises(RoleDied, match="exited with code 9"):
                server.wait_for("actor", 2, HANG_S)
            for future in (pending, ask(server, "actor", 0, "train_step", timeout_s=HANG_S)):
                with pytest.raises(RoleDied, match="exited with code 9"):
                    future.result(HANG_S)
            received(critic).reply(1)
            assert other.result(HANG_S) == 1
            late = ask(server, "critic", 0, "values", timeout_s=HANG_S)
            server.give_up("critic", 0, "its node is gone")
            with pytest.raises(RoleDied, match="its node is gone"):
                late.result(HANG_S)


def test_closing_fails_what_is_pending_and_the_ranks_learn_of_it(keys: RunKeys) -> None:
    server = ControlServer(keys)
    reasons: list[str] = []
    with ControlClient(server.endpoint(), keys, "actor", 0, 1, on_conductor_lost=reasons.append) as client:
        client.connect(HANG_S)
        assert client.conductor_lost == ""
        future = ask(server, "actor", 0, "train_step", timeout_s=HANG_S)
        request = received(client)
        server.close()
        server.close()
        with pytest.raises(RunError, match="closed before actor rank 0"):
            future.result(HANG_S)
        with pytest.raises(RunError, match="closed"):
            ask(server, "actor", 0, "train_step", timeout_s=1)
        for _ in range(2):
            with pytest.raises(RoleDied, match="it said goodbye"):
                client.receive(HANG_S)
        request.reply(None)
        assert reasons == ["it said goodbye"]
        assert client.conductor_lost == "it said goodbye"


def test_replies_sent_right_before_closing_arrive(keys: RunKeys) -> None:
    with ControlServer(keys) as server:
        for rank in range(5):
            with ControlClient(server.endpoint(), keys, "actor", rank, 5) as client:
                client.connect(HANG_S)
                future = ask(server, "actor", rank, "shutdown", timeout_s=HANG_S)
                received(client).reply(np.ones(2_000_000))
            assert future.result(HANG_S).sum() == 2_000_000


def test_a_callback_that_raises_harms_nobody(keys: RunKeys) -> None:
    with ControlServer(keys, on_event=lambda *_: 1 / 0) as server:
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.event("before the welcome", name="n")
            client.connect(HANG_S)
            client.event("progress")
            future = ask(server, "actor", 0, "echo", timeout_s=HANG_S)
            received(client).reply(3)
            assert future.result(HANG_S) == 3


def test_wrong_addresses_are_named() -> None:
    keys = RunKeys(*["x" * 40] * 4)
    with pytest.raises(RunError, match=r"cannot listen on '203\.0\.113\.7'"):
        ControlServer(keys, host="203.0.113.7")
    with pytest.raises(RunError, match="'nonsense' is no endpoint"):
        ControlClient("nonsense", keys, "actor", 0, 1)


def test_endpoints_name_the_host_the_ranks_can_reach(keys: RunKeys) -> None:
    with ControlServer(keys) as server:
        assert server.endpoint("node01").startswith("tcp://node01:")
        assert server.endpoint().startswith("tcp://127.0.0.1:")
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.connect(HANG_S)

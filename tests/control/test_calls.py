"""Calls to processes of their own: replies, errors, deadlines, many at once, large ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_peer import INTERVAL, ask, start_peer, stop_peer

from slurm_rlhf.control.auth import RunKeys
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.roster import Peer
from slurm_rlhf.control.server import ControlServer
from slurm_rlhf.errors import CallTimeout, ConfigError, RemoteError, RoleDied, RunError, WireError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

# Nobody is meant to be lost here, however busy the machine is.
LIMIT = 15.0


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

    def call(self, method: str, rank: int = 0, timeout_s: float = 20, **args: Any) -> Any:
        return ask(self.server, "actor", rank, method, timeout_s=timeout_s, **args).result(30)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    made = Team(tmp_path_factory.mktemp("team"))
    try:
        made.server.wait_for("actor", 2, 30)
        yield made
        assert made.lost == []
        assert (made.server.loop.garbage, made.server.loop.replayed, made.server.loop.refused) == (0, 0, 0)
    finally:
        made.server.close()
        for process in made.processes:
            stop_peer(process)


def test_the_ranks_introduce_themselves(team: Team) -> None:
    peers = team.server.wait_for("actor", 2, 1)
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
    assert ask(team.server, "actor", 0, "echo", timeout_s=10, **names).result(10) == names
    array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    doubled = team.call("double", array=array)["array"]
    assert np.array_equal(doubled, array * 2)
    assert doubled.flags.aligned
    doubled += 1


def test_arrays_may_change_as_soon_as_they_are_handed_over(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    with ControlServer(keys) as server, ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
        client.connect(10)
        array = np.ones(5_000_000)
        future = ask(server, "actor", 0, "double", timeout_s=10, array=array)
        array[:] = -1
        request = client.receive(10)
        assert request is not None
        received = request.args["array"]
        assert received.min() == 1
        request.reply(received)
        received[:] = -2
        assert future.result(10).min() == 1


def test_two_ranks_work_at_the_same_time(team: Team) -> None:
    began = time.monotonic()
    futures = [ask(team.server, "actor", rank, "sleep", timeout_s=20, seconds=0.6) for rank in range(2)]
    assert [future.result(10) for future in futures] == ["slept"] * 2
    assert time.monotonic() - began < 1.1


def test_many_outstanding_calls_are_answered_in_order(team: Team) -> None:
    futures = [ask(team.server, "actor", n % 2, "echo", timeout_s=30, n=n) for n in range(4000)]
    assert [future.result(30)["n"] for future in futures] == list(range(4000))


def test_calls_from_many_threads(team: Team) -> None:
    results: list[int] = []

    def work(offset: int) -> None:
        results.extend(team.call("echo", rank=offset % 2, n=offset + n)["n"] for n in range(50))

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == sorted(1000 * k + n for k in range(8) for n in range(50))


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


def test_a_passed_deadline_names_everything_and_the_late_reply_is_dropped(team: Team) -> None:
    late = team.server.loop.late
    peer = team.server.peers("actor")[1]
    with pytest.raises(CallTimeout) as caught:
        team.call("sleep", 1, timeout_s=0.5, seconds=1.2)
    for part in ("actor rank 1", peer.host, f"pid {peer.pid}", "sleep", "0.5 s", "phase 'sleep'"):
        assert part in str(caught.value)
    assert team.call("echo", 1, a=2) == {"a": 2}
    assert team.server.loop.late == late + 1


def test_a_deadline_counts_from_the_last_reply_of_a_rank_that_works_its_calls_off(team: Team) -> None:
    futures = [ask(team.server, "actor", 0, "sleep", timeout_s=0.8, seconds=0.4) for _ in range(5)]
    assert [future.result(10) for future in futures] == ["slept"] * 5


def test_a_rank_that_is_not_there(team: Team) -> None:
    with pytest.raises(RoleDied, match="actor rank 2 is not connected; connected ranks of actor: 0, 1"):
        team.call("echo", 2)
    with pytest.raises(RoleDied, match="connected ranks of critic: none"):
        ask(team.server, "critic", 0, "echo", timeout_s=1).result(1)
    with pytest.raises(CallTimeout, match=r"actor: 2 of 4 ranks said hello within 0\.2 s; missing: 2, 3"):
        team.server.wait_for("actor", 4, 0.2)


def test_heartbeats_overtake_large_arrays(team: Team) -> None:
    size, count = 100_000_000, 4
    peer = team.server.peers("actor")[0]
    began = last = time.monotonic()
    heard, silences = peer.heard, []
    futures = [ask(team.server, "actor", 0, "zeros", timeout_s=30, bytes=size) for _ in range(count - 1)]
    futures += [ask(team.server, "actor", 0, "double", timeout_s=30, array=np.ones(size, np.uint8))]
    while not all(future.done() for future in futures):
        time.sleep(0.01)
        if peer.heard != heard:
            silences.append(time.monotonic() - last)
            heard, last = peer.heard, time.monotonic()
    total = time.monotonic() - began
    print(f"{count + 1} x 100 MB in {total:.2f} s, longest silence {max(silences):.2f} s")
    assert [future.result().nbytes for future in futures[:-1]] == [size] * (count - 1)
    assert futures[-1].result()["array"].sum() == 2 * size
    # In the line with the arrays they would all come at the end.
    assert max(silences) < 0.5 * total


def test_heartbeats_go_on_while_the_rank_computes(team: Team) -> None:
    peer = team.server.peers("actor")[1]
    busy = ask(team.server, "actor", 1, "compute", timeout_s=30, seconds=1.5)
    heard = set()
    while not busy.done():
        heard.add(peer.heard)
        time.sleep(0.02)
    assert busy.result() == "computed"
    assert len(heard) >= 4


def test_looking_for_calls_is_cheap_and_starts_no_wait(team: Team) -> None:
    with ControlClient(team.server.endpoint(), team.keys, "rollout", 0, 1) as client:
        client.connect(10)
        began = time.perf_counter()
        for _ in range(10_000):
            assert client.receive(0) is None
        assert (time.perf_counter() - began) / 10_000 < 50e-6
        future = ask(team.server, "rollout", 0, "generate", timeout_s=10, n=1)
        request = client.receive(10)
        assert request is not None
        assert (request.method, request.args) == ("generate", {"n": 1})
        request.reply("done")
        assert future.result(10) == "done"
        with pytest.raises(RunError, match="answered already"):
            request.reply("again")


def test_a_rank_that_leaves_is_not_lost_but_cannot_be_called(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    lost: list[Peer] = []
    with ControlServer(keys, on_lost=lost.append) as server:
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.connect(10)
            future = ask(server, "actor", 0, "train_step", timeout_s=10)
        with pytest.raises(RoleDied, match="it said goodbye"):
            future.result(5)
        with pytest.raises(RoleDied, match="it said goodbye"):
            server.wait_for("actor", 1, 5)
        assert lost == []
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.connect(10)
            assert not server.wait_for("actor", 1, 5)[0].lost


def test_a_failed_role_fails_everything_of_it_at_once_and_nothing_else(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    with ControlServer(keys) as server, ControlClient(server.endpoint(), keys, "actor", 0, 2) as actor:
        with ControlClient(server.endpoint(), keys, "critic", 0, 1) as critic:
            actor.connect(10)
            critic.connect(10)
            pending = ask(server, "actor", 0, "train_step", timeout_s=60)
            other = ask(server, "critic", 0, "values", timeout_s=60)
            threading.Timer(0.3, server.fail_role, ("actor", RoleDied("actor rank 1 exited with code 9"))).start()
            with pytest.raises(RoleDied, match="exited with code 9"):
                server.wait_for("actor", 2, 30)
            for future in (pending, ask(server, "actor", 0, "train_step", timeout_s=60)):
                with pytest.raises(RoleDied, match="exited with code 9"):
                    future.result(1)
            request = critic.receive(5)
            assert request is not None
            request.reply(1)
            assert other.result(5) == 1


def test_closing_fails_what_is_pending_and_the_ranks_learn_of_it(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    server = ControlServer(keys)
    reasons: list[str] = []
    with ControlClient(server.endpoint(), keys, "actor", 0, 1, on_conductor_lost=reasons.append) as client:
        client.connect(10)
        assert client.conductor_lost == ""
        future = ask(server, "actor", 0, "train_step", timeout_s=60)
        request = client.receive(5)
        server.close()
        server.close()
        with pytest.raises(RunError, match="closed before actor rank 0"):
            future.result(1)
        with pytest.raises(RunError, match="closed"):
            ask(server, "actor", 0, "train_step", timeout_s=1)
        for _ in range(2):
            with pytest.raises(RoleDied, match="it said goodbye"):
                client.receive(5)
        assert request is not None
        request.reply(None)
        assert reasons == ["it said goodbye"]
        assert client.conductor_lost == "it said goodbye"


def test_replies_sent_right_before_closing_arrive(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    with ControlServer(keys) as server:
        for rank in range(5):
            with ControlClient(server.endpoint(), keys, "actor", rank, 5) as client:
                client.connect(10)
                future = ask(server, "actor", rank, "shutdown", timeout_s=10)
                request = client.receive(5)
                assert request is not None
                request.reply(np.ones(2_000_000))
            assert future.result(5).sum() == 2_000_000


def test_a_callback_that_raises_harms_nobody(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    with ControlServer(keys, on_event=lambda *_: 1 / 0) as server:
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.event("before the welcome", name="n")
            client.connect(10)
            client.event("progress")
            future = ask(server, "actor", 0, "echo", timeout_s=5)
            request = client.receive(5)
            assert request is not None
            request.reply(3)
            assert future.result(5) == 3


def test_wrong_addresses_and_times_are_named() -> None:
    keys = RunKeys(*["x" * 40] * 4)
    with pytest.raises(RunError, match=r"cannot listen on '203\.0\.113\.7'"):
        ControlServer(keys, host="203.0.113.7")
    with pytest.raises(RunError, match="'nonsense' is no endpoint"):
        ControlClient("nonsense", keys, "actor", 0, 1)
    with pytest.raises(ConfigError, match=r"timeout\.heartbeat_interval = 10"):
        ControlServer(keys, heartbeat_interval=10)


def test_endpoints_name_the_host_the_ranks_can_reach(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    with ControlServer(keys) as server:
        assert server.endpoint("node01").startswith("tcp://node01:")
        assert server.endpoint().startswith("tcp://127.0.0.1:")
        with ControlClient(server.endpoint(), keys, "actor", 0, 1) as client:
            client.connect(10)

"""The control port and strangers: keys, and attacks."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from control_peer import ask, received
from msgspec import msgpack
from waiting import HANG_S, until

from slurm_rlhf.errors import CallTimeout, ConfigError, WireError
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.codec import encode
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Envelope, unpack


def test_keys_are_private_and_the_same_after_loading(tmp_path: Path) -> None:
    path = tmp_path / "run" / "keys.json"
    previous = os.umask(0)
    try:
        keys = RunKeys.create(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKeys.load(path) == keys
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    assert os.listdir(path.parent) == ["keys.json"]


def test_every_run_has_other_keys_and_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, second = RunKeys.create(path), RunKeys.create(path)
    assert not {*astuple(first)} & {*astuple(second)}
    assert RunKeys.load(path) == second


def test_a_link_in_the_files_place_is_replaced_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    (tmp_path / "keys.json").symlink_to(elsewhere)
    RunKeys.create(tmp_path / "keys.json")
    assert elsewhere.read_text() == "precious"
    RunKeys.load(tmp_path / "keys.json")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    RunKeys.create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to other users"):
        RunKeys.load(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    RunKeys.create(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        RunKeys.load(path)


def test_missing_linked_piped_and_foreign_files_are_refused(tmp_path: Path) -> None:
    RunKeys.create(tmp_path / "keys.json")
    (tmp_path / "link").symlink_to(tmp_path / "keys.json")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("missing", "No such file"), ("link", "cannot be read"), ("pipe", "not a regular file")):
        with pytest.raises(ConfigError, match=why):
            RunKeys.load(tmp_path / name)


def test_damaged_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    RunKeys.create(path)
    good = json.loads(path.read_text())
    swapped = {**good, "client_public": good["server_public"]}
    damaged = ["", "{}", "[]", "null", path.read_text()[:-20], json.dumps(swapped)]
    damaged += [json.dumps({**good, "server_secret": value}) for value in ("short", 3, "é" * 40)]
    for content in damaged:
        path.write_text(content)
        with pytest.raises(ConfigError, match="holds no keys"):
            RunKeys.load(path)


# --- intruders --------------------------------------------------------------------------------------------------------


HELLO = {"role": "critic", "rank": 0, "world": 2, "host": "node09", "pid": 1, "start": 0}


def message(kind: Any, number: int, body: Any = None, call: int = 0, name: str = "") -> list[Any]:
    return [Envelope(kind, number, call, name).pack(), *([] if body is None else encode(body))]


class Setting:
    """A conductor's end, an honest actor, and room for intruders."""

    def __init__(self, directory: Path) -> None:
        self.keys = RunKeys.create(directory / "keys.json")
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.server = ControlServer(self.keys, on_event=lambda _, name, data: self.events.append((name, data)))
        self.client = ControlClient(self.server.endpoint(), self.keys, "actor", 0, 1)
        self.client.connect(HANG_S)
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.linger = 0

    def dealer(self, server_key: str = "", client: RunKeys | None = None) -> zmq.Socket[Any]:
        """A raw connection; without arguments one that speaks no CURVE."""
        dealer = self.context.socket(zmq.DEALER)
        if client is not None:
            dealer.curve_serverkey = server_key.encode()
            dealer.curve_publickey = client.client_public.encode()
            dealer.curve_secretkey = client.client_secret.encode()
        dealer.connect(self.server.endpoint())
        return dealer

    def insider(self) -> zmq.Socket[Any]:
        """A raw connection with the run's key."""
        return self.dealer(self.keys.server_public, self.keys)

    def call_works(self) -> bool:
        future = ask(self.server, "actor", 0, "echo", timeout_s=HANG_S)
        received(self.client).reply("fine")
        return future.result(HANG_S) == "fine"


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    try:
        yield made
        assert made.call_works()
        assert [peer.lost for peer in made.server.peers("actor")] == [""]
    finally:
        made.context.destroy(linger=0)
        made.client.close()
        made.server.close()


@pytest.mark.parametrize("intruder", ["no key", "another client key", "another server key"])
def test_a_peer_without_the_runs_key_is_refused_and_counted(setting: Setting, tmp_path: Path, intruder: str) -> None:
    other = RunKeys.create(tmp_path / "other.json")
    dealer = {
        "no key": setting.dealer,
        "another client key": lambda: setting.dealer(setting.keys.server_public, other),
        "another server key": lambda: setting.dealer(other.server_public, setting.keys),
    }[intruder]()
    dealer.send_multipart(message("hello", 0, HELLO))
    assert until(lambda: setting.server.auth.refused > 0)
    assert setting.call_works()
    assert setting.server.peers("critic") == []
    assert setting.server.garbage == 0


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + bytes(63), b"", bytes(10_000)])
def test_other_protocols_are_refused_and_counted(setting: Setting, content: bytes) -> None:
    host, port = setting.server.endpoint().removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(content)
        assert setting.call_works()
    assert until(lambda: setting.server.auth.refused > 0)


@pytest.mark.slow
def test_who_says_nothing_is_cut_off(setting: Setting) -> None:
    host, port = setting.server.endpoint().removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), HANG_S) as stranger:
        while stranger.recv(100):
            pass  # ZeroMQ's greeting
    assert until(lambda: setting.server.auth.refused == 1)
    assert setting.server._router.handshake_ivl == 5000


@pytest.mark.slow
def test_a_client_with_the_wrong_key_learns_why(setting: Setting, tmp_path: Path) -> None:
    with ControlClient(setting.server.endpoint(), RunKeys.create(tmp_path / "other.json"), "critic", 0, 1) as client:
        with pytest.raises(CallTimeout, match=r"critic rank 0: .*gave no welcome in 0\.5 s: .*key is another one"):
            client.connect(0.5)


def nonsense() -> list[list[bytes]]:
    dice = random.Random(0)
    messages = [[], [b""], [b"", b""], [b"\xc1"], [b"x" * 1000], [b"\x91" * 1000], [b"\xdd\xff\xff\xff\xff"]]
    envelopes = [("hallo", 1, 0), ("event", -1, 0), ("event", 1), ("event", "1", 0), ("event", 1, None), (1, 2, 3)]
    messages += [[msgpack.encode(envelope)] for envelope in envelopes]
    messages += [message(kind, 0) for kind in ("hello", "beat", "pulse", "reply", "bye", "call", "lost", "welcome")]
    for wrong in ({"rank": 2}, {"rank": -1}, {"role": ""}, {"role": 3}, {"pid": None}, {"world": "2"}):
        messages.append(message("hello", 0, {**HELLO, **wrong}))
    messages += [message("hello", 0, [1]), message("hello", 0, "hello"), [Envelope("hello", 0).pack(), b"\xc1"]]
    whole = message("hello", 0, {**HELLO, "array": np.zeros(10_000)})
    messages += [whole[:-1], [*whole[:-1], whole[-1][:-1]], [*whole, b"more"]]
    messages += [[dice.randbytes(dice.randrange(100)) for _ in range(dice.randrange(1, 5))] for _ in range(200)]
    return messages


def test_what_is_no_envelope_is_not_read() -> None:
    for frames in ([], message("hello", 0, HELLO, name="h" * 1024)):
        with pytest.raises(WireError, match="without an envelope"):
            unpack(frames)


def test_nonsense_from_a_stranger_with_the_key_is_counted(setting: Setting) -> None:
    dealer = setting.insider()
    for frames in nonsense():
        dealer.send_multipart(frames or [b""])
    assert until(lambda: setting.server.garbage == len(nonsense()))
    assert setting.server.peers("critic") == []
    assert setting.server.auth.refused == 0


def test_nonsense_from_a_rank_is_counted_and_the_rank_goes_on(setting: Setting) -> None:
    dealer = setting.insider()
    for _ in range(2):  # a rank says hello until it is welcome
        dealer.send_multipart(message("hello", 0, HELLO))
        assert dealer.recv_multipart()[0] == Envelope("welcome", 0).pack()
    bad = [[b"\xc1"], message("call", 1), message("event", 2), message("event", 3, [1])]
    bad += [message("reply", 4, 1, call=99), message("pulse", 4), message("hello", 0, {**HELLO, "rank": "x"})]
    for frames in bad:
        dealer.send_multipart(frames)
    dealer.send_multipart(message("event", 5, {"n": 1}, name="fine"))
    assert until(lambda: setting.events == [("fine", {"n": 1})])
    assert setting.server.garbage == len(bad)
    assert [peer.lost for peer in setting.server.peers("critic")] == [""]


def test_replayed_messages_are_counted_and_have_no_effect(setting: Setting) -> None:
    dealer = setting.insider()
    hello, event = message("hello", 0, HELLO), message("event", 1, {}, name="once")
    for frames in (hello, event, event, event, message("beat", 0)):
        dealer.send_multipart(frames)
    assert until(lambda: setting.server.replayed == 3)
    assert setting.events == [("once", {})]
    futures = [ask(setting.server, "critic", 0, "values", timeout_s=HANG_S) for _ in range(2)]
    for number in (2, 2, 3):
        dealer.send_multipart(message("reply", number, number, call=number - 1))
    assert [future.result(HANG_S) for future in futures] == [2, 3]
    assert setting.server.replayed == 4


def test_a_reply_counts_only_from_the_rank_that_was_called(setting: Setting) -> None:
    dealer = setting.insider()
    dealer.send_multipart(message("hello", 0, HELLO))
    setting.server.wait_for("critic", 1, HANG_S)
    future = ask(setting.server, "actor", 0, "echo", timeout_s=HANG_S)
    request = received(setting.client)
    dealer.send_multipart(message("reply", 1, "forged", call=request.id))
    assert until(lambda: setting.server.late == 1)
    assert not future.done()
    request.reply("true")
    assert future.result(HANG_S) == "true"


def test_a_second_process_cannot_take_a_rank(setting: Setting) -> None:
    with ControlClient(setting.server.endpoint(), setting.keys, "actor", 0, 1, host="elsewhere") as second:
        with pytest.raises(CallTimeout, match=r"actor rank 0 on .* \(pid \d+\) has this rank"):
            second.connect(0.5)
        second.event("from the wrong one")
        assert setting.call_works()
    assert setting.server.replayed > 0
    assert setting.events == []


def test_a_flood_of_garbage_stalls_nothing(setting: Setting) -> None:
    dealer = setting.insider()
    for _ in range(20_000):
        dealer.send_multipart([b"\xc1" * 20, b"garbage"])
    assert all(setting.call_works() for _ in range(20))
    assert until(lambda: setting.server.garbage == 20_000)


def test_a_reply_that_does_not_decode_fails_its_call_at_once(setting: Setting) -> None:
    dealer = setting.insider()
    dealer.send_multipart(message("hello", 0, HELLO))
    setting.server.wait_for("critic", 1, HANG_S)
    for number, (kind, broken) in enumerate([("reply", [b"\xc1"]), ("error", encode({})), ("error", encode(3))], 1):
        future = ask(setting.server, "critic", 0, "values", timeout_s=HANG_S)
        dealer.send_multipart([Envelope(kind, number, number).pack(), *broken])
        with pytest.raises(Exception, match=r"critic rank 0 on node09 .*values.* broken"):
            future.result(HANG_S)
    assert setting.server.garbage == 3


def test_garbage_from_the_conductors_side_is_counted_by_the_rank(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys.json")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.curve_server = True
        router.curve_secretkey = keys.server_secret.encode()
        router.bind("tcp://127.0.0.1:0")
        with ControlClient(router.getsockopt_string(zmq.LAST_ENDPOINT), keys, "actor", 0, 1) as client:
            route = router.recv_multipart()[0]
            router.send_multipart([route, *message("welcome", 0)])
            client.connect(HANG_S)
            call = message("call", 1, {"n": 1}, call=1, name="echo")
            bad = [[b"\xc1"], call, [b""], [msgpack.encode(("call", 2, 2, 3))]]
            for frames in (call, *bad):
                router.send_multipart([route, *frames])
            assert until(lambda: client.garbage == len(bad))
            assert received(client).argument() == {"n": 1}
            assert client.receive(0) is None
            assert client.conductor_lost == ""

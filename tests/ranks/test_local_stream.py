"""The stream between the ranks of an engine: what it carries, who may use it, and how its end is noticed."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from waiting import HANG_S

from slurm_rlhf.errors import CallTimeout, RoleDied, WireError
from slurm_rlhf.ranks.follower_links import LocalListener, LocalStream, connect_local


@pytest.fixture
def listener() -> Iterator[LocalListener]:
    made = LocalListener(4)
    yield made
    made.close()


@pytest.fixture
def ends(listener: LocalListener) -> Iterator[tuple[LocalStream, LocalStream]]:
    one = connect_local(listener.path, HANG_S)
    other = listener.accept(HANG_S)
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[LocalStream, LocalStream]) -> None:
    one, other = ends
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
    assert one.receive(HANG_S) == "back"


def test_the_end_of_the_other_process_is_noticed_at_once(listener: LocalListener) -> None:
    child = os.fork()
    if child == 0:
        stream = connect_local(listener.path, HANG_S)
        stream.send("here")
        time.sleep(60)
        os._exit(0)
    stream = listener.accept(HANG_S)
    assert stream.pid == child
    assert stream.receive(HANG_S) == "here"
    ended: SimpleQueue[Exception] = SimpleQueue()
    stream.listen(lambda _: None, ended.put)
    os.kill(child, 9)
    error = ended.get(timeout=HANG_S)
    os.waitpid(child, 0)
    assert isinstance(error, RoleDied)
    assert str(child) in str(error)
    with pytest.raises(RoleDied):
        stream.send("anybody?")


def test_ones_own_end_is_no_event(ends: tuple[LocalStream, LocalStream]) -> None:
    one, other = ends
    mine: SimpleQueue[Exception] = SimpleQueue()
    theirs: SimpleQueue[Exception] = SimpleQueue()
    one.listen(lambda _: None, mine.put)
    other.listen(lambda _: None, theirs.put)
    one.close()
    theirs.get(timeout=HANG_S)
    assert mine.empty()


def test_what_is_no_message_is_an_error(listener: LocalListener) -> None:
    bare = socket.socket(socket.AF_UNIX)
    bare.connect(listener.path)
    stream = listener.accept(HANG_S)
    bare.sendall(struct.pack("<I", 1 << 31))
    with pytest.raises(WireError, match="2147483648 frames"):
        stream.receive(HANG_S)
    bare.sendall(struct.pack("<IQ", 1, 1 << 40))
    with pytest.raises(WireError, match="frame of 1099511627776 bytes"):
        stream.receive(HANG_S)
    bare.sendall(struct.pack("<IQ", 1, 4) + b"\xc1\xc1\xc1\xc1")
    with pytest.raises(WireError, match="does not decode"):
        stream.receive(HANG_S)
    with pytest.raises(CallTimeout):
        stream.receive(0.05)
    bare.close()


def test_nobody_else_can_connect(listener: LocalListener, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = os.path.dirname(listener.path)
    assert os.stat(directory).st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(WireError, match="of user 54321"):
        connect_local(listener.path, HANG_S)


def test_everybody_is_awaited_and_the_missing_are_named(listener: LocalListener) -> None:
    def come(number: int) -> None:
        connect_local(listener.path, HANG_S).send(number)

    for number in (3, 1):
        threading.Thread(target=come, args=(number,)).start()
    with pytest.raises(CallTimeout, match=r"rank \[2\] did not connect within 0.5 s"):
        listener.accept_all({1, 2, 3}, 0.5)
    threading.Thread(target=come, args=(7,)).start()
    with pytest.raises(WireError, match="says it is rank 7"):
        listener.accept_all({1, 2}, 5)
    listener.close()
    assert not os.path.exists(listener.path)
    with pytest.raises(RoleDied, match="nobody listens"):
        connect_local(listener.path, 1)

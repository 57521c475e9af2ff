"""Where a store listens, and that it stops when all have come: torch's own, and strangers that know its protocol."""

from __future__ import annotations

import random
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
from open_ports import store_commands
from torch.distributed import TCPStore
from waiting import HANG_S, until

from slurm_rlhf.cluster import network
from slurm_rlhf.cluster.network import JOINED, own_address, shut, shut_when_joined, tell_joined

SECRET = "of the run"


def opened() -> tuple[TCPStore, int, int]:
    """(a store, its port, the descriptor at which it listens)."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, number = listener.getsockname()[1], listener.detach()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=number)
    return store, port, number


def joined(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=HANG_S))


def test_a_stranger_can_change_a_store_that_listens_and_cannot_reach_one_that_is_shut() -> None:
    store, port, number = opened()
    member = joined(port)
    member.set("verdict", "ours")
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(store_commands(random.Random(0)))
        until(lambda: member.get("verdict") != b"ours")  # it knows no password
    shut(number)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
    member.set("later", "x" * 100_000)
    assert store.get("later") == b"x" * 100_000  # who was there goes on
    assert member.add("count", 2) == store.add("count", 0) == 2


def test_it_listens_until_the_last_rank_has_joined() -> None:
    store, port, number = opened()
    shut_when_joined(store, number, range(4, 6), SECRET)
    members = [joined(port)]
    tell_joined(members[0], 4, SECRET)
    time.sleep(1.2)
    members.append(joined(port))
    tell_joined(members[1], 5, SECRET)
    assert until(lambda: not reachable(port))
    members[0].set("key", "value")
    assert members[1].get("key") == b"value"


def test_a_stranger_counts_no_rank_in() -> None:
    """Not by the key that ranks use, not by another's proof: the door would be shut before the last rank."""
    store, port, number = opened()
    shut_when_joined(store, number, range(2), SECRET)
    member, stranger = joined(port), joined(port)
    tell_joined(member, 0, SECRET)
    stranger.add(JOINED, 2)
    for forged in ("1", "", stranger.get(f"{JOINED}/0").decode()):
        stranger.set(f"{JOINED}/1", forged)
        time.sleep(1.2)
        assert reachable(port)
    tell_joined(stranger, 1, "another secret")
    time.sleep(1.2)
    last = joined(port)
    tell_joined(last, 1, SECRET)
    assert until(lambda: not reachable(port))


def reachable(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "means", "interfaces", "address"),
    [
        ("node1", ["10.0.0.1"], "", "10.0.0.1"),
        ("node1", ["127.0.1.1"], "", "192.168.1.1"),  # Debian; the first that is not loopback
        ("node1", ["127.0.1.1"], "ib0", "10.0.0.1"),
        ("node1", ["127.0.1.1"], "gone, ib0", "10.0.0.1"),
        ("node1", ["203.0.113.9"], "ib0", "10.0.0.1"),  # an address that is translated on the way
        ("node1", [], "ib0", "10.0.0.1"),  # a name that means nothing here
        ("node1", ["127.0.1.1", "10.0.0.1"], "", "10.0.0.1"),
        ("localhost", ["10.0.0.1"], "ib0", "127.0.0.1"),
        ("127.0.0.1", [], "ib0", "127.0.0.1"),
    ],
)
def test_the_address_that_others_reach_by_a_name(
    monkeypatch: pytest.MonkeyPatch, name: str, means: list[str], interfaces: str, address: str
) -> None:
    owned = [("lo", "127.0.0.1"), ("eth0", "192.168.1.1"), ("ib0", "10.0.0.1")]
    monkeypatch.setattr(network, "addresses", lambda: [(each, network._parsed(ip)) for each, ip in owned])

    def resolve(*_: object, **__: object) -> list[object]:
        if not means:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in means]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert own_address(name, interfaces) == address


def test_no_file_of_the_package_listens_on_all_addresses() -> None:
    """Nor does it let torch: a store is given the socket that it listens at."""
    package = Path(network.__file__).parents[1]
    for file in package.rglob("*.py"):
        text = file.read_text()
        assert '"0.0.0.0"' not in text, file
        assert 'create_server(("",' not in text, file
        assert text.count("is_master=True") <= text.count("master_listen_fd="), file

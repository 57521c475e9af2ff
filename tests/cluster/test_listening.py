"""Where a store listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slurm_rlhf.cluster import network
from slurm_rlhf.cluster.network import own_address


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

"""Which network interface a group's connections use.

On a node with several, the first one by name is as likely a management network that the peers cannot reach as the
right one. The kernel's route to a peer that is known to be reachable, the store's host, decides instead.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from slurm_rlhf.errors import ConfigError, SyncError

_SIOCGIFADDR = 0x8915


def local_address(host: str, port: int) -> str:
    """The address from which this node reaches `host`. Sends nothing. Raises SyncError if there is no route."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SyncError(
            f"{socket.gethostname()} has no route to {host}, where the group's store is ({error}); "
            f"check the name resolution and the network between the nodes"
        ) from error


def interface_of(address: str) -> str:
    """The name of the interface that owns `address`; the address itself if none says so (an alias, a container)."""
    wanted = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    for name, owned in _addresses():
        if owned == wanted:
            return name
    return "lo" if wanted.is_loopback else address


def address_of(interface: str) -> str:
    """The address of `interface`. Raises ConfigError naming the interfaces there are."""
    addresses = _addresses()
    for name, owned in addresses:
        if name == interface:
            return str(owned)
    raise ConfigError(
        f"sync.interface: {socket.gethostname()} has no interface {interface!r} with an address; "
        f"it has {', '.join(sorted({name for name, _ in addresses}))}. Leave it empty to take the one that reaches the "
        f"peers."
    )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%", maxsplit=1)[0]).is_loopback


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(interface, address), IPv4 first."""
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # no IPv4 address
            found.append((name, ipaddress.IPv4Address(answer[20:24])))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        found.append((name, ipaddress.IPv6Address(int(digits, 16))))
    return found

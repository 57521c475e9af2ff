"""Find the address and interface by which this machine reaches another, and listen there."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from slurm_rlhf.errors import ConfigError, PlacementError
from slurm_rlhf.wire import timeouts

_ANY_PORT = 9
_BACKLOG = 4096
LOOPBACK = "127.0.0.1"
_LOOPBACK = {"localhost": LOOPBACK, LOOPBACK: LOOPBACK, "::1": "::1"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def address_towards(host: str) -> str:
    """Return the address of this machine that `host` sees, IPv4 if possible. Sends nothing.

    Raises PlacementError if `host` has no address, or if there is no route to it.
    """
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PlacementError(
            f"{socket.gethostname()} cannot reach node {host} ({error.strerror or error}): start the run on a node "
            f"that is on the same network, and check that {host} is a name there"
        ) from error


def address_among(nodes: Iterable[str], own: str) -> str:
    """Return the address of this node, `own`, that the other `nodes` see; loopback if there are none.

    Raises PlacementError as `address_towards`.
    """
    other = next((node for node in nodes if node != own), None)
    return address_towards(other) if other else LOOPBACK


def interface_of(address: str) -> str:
    """Return the network interface that has `address`; empty if none has it (an alias, a container)."""
    wanted = _parsed(address)
    return next((name for name, owned in addresses() if owned == wanted), "lo" if wanted.is_loopback else "")


def address_of(interface: str, key: str) -> str:
    """Return the address of `interface`. Raises ConfigError with `key` and the existing interfaces."""
    owned = addresses()
    for name, address in owned:
        if name == interface:
            return str(address)
    raise ConfigError(
        f"{key}: {socket.gethostname()} has no interface {interface!r} with an address; it has "
        f"{', '.join(sorted({name for name, _ in owned}))}. Leave it empty to use the one that reaches the peers."
    )


def own_address(name: str, interfaces: str = "") -> str:
    """Return the address of this machine that others reach by `name`, to listen on that address alone.

    If the name stands for none of this machine's addresses, or only for loopback, as Debian's 127.0.1.1: the address of
    the first of `interfaces` (eth0,ib0), else the first that is not loopback. `localhost` and the like mean loopback.
    """
    if name in _LOOPBACK:
        return _LOOPBACK[name]
    owned = addresses()
    try:
        found = {_parsed(str(each[4][0])) for each in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    chosen = [name.strip() for name in interfaces.split(",") if name.strip()]
    outside = [(interface, address) for interface, address in owned if not address.is_loopback]
    named = [address for _, address in outside if address in found]
    meant = [address for interface in chosen for name, address in owned if name == interface]
    return str(next(iter([*named, *meant, *(address for _, address in outside)]), _LOOPBACK["localhost"]))


def listening(address: str) -> socket.socket:
    """Listen at a free port of `address`. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def unreachable(address: str, port: int, timeout_s: float = timeouts.CONNECT_S, listens: bool = True) -> str:
    """Say why a port cannot be reached; empty: it can. Blocks for `timeout_s` at most.

    `listens`: a process has to listen there. False: a refused connection will do, too, since the machine answered.
    """
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        answered = isinstance(error, ConnectionRefusedError) and not listens
        return "" if answered else error.strerror or str(error)
    return ""


def link_mbits(interfaces: str, root: Path = Path("/sys/class/net")) -> int:
    """Return the speed of a network interface, or of several (ib0,ib1) together, in Mbit/s; 0: not known.

    The kernel has it for Ethernet, and for InfiniBand as the rate of the port ("200 Gb/sec (4X HDR)").
    """
    speeds = [_mbits(root / name) for name in interfaces.split(",") if name]
    return sum(speeds) if all(speeds) else 0


def _mbits(directory: Path) -> int:
    for file in (directory / "speed", *sorted(directory.glob("device/infiniband/*/ports/*/rate"))):
        with suppress(OSError, ValueError, IndexError):  # loopback, or an interface that is down
            found = float(file.read_text(encoding="ascii").split()[0])
            if found > 0:
                return round(found if file.name == "speed" else 1000 * found)
    return 0


def is_loopback(address: str) -> bool:
    """Tell whether an address can only be reached from its own node."""
    return _parsed(address).is_loopback


def addresses() -> list[tuple[str, Address]]:
    """List (interface, address) of this machine, IPv4 first."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    known = [(name, each) for name, those in psutil.net_if_addrs().items() for each in those if each.family in kinds]
    known.sort(key=lambda one: kinds.index(one[1].family))
    return [(name, _parsed(each.address)) for name, each in known]


def _parsed(address: str) -> Address:
    return ipaddress.ip_address(address.split("%", maxsplit=1)[0])

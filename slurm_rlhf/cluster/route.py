"""By which address and network interface this machine reaches another: the kernel's route decides, not luck.

On a node with several networks the first interface by name is as likely a management network that the others cannot
reach as the right one.
"""

from __future__ import annotations

import fcntl
import socket
import struct

from slurm_rlhf.errors import PlacementError

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_ANY_PORT = 9


def address_towards(host: str) -> str:
    """The IPv4 address of this machine that `host` sees. Sends nothing.

    Raises PlacementError when `host` has no address or there is no route to it.
    """
    try:
        target = socket.getaddrinfo(host, _ANY_PORT, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PlacementError(
            f"{socket.gethostname()} cannot reach node {host} ({error.strerror or error}): start the run on a node "
            f"that is on the same network, and check that {host} is a name there"
        ) from error


def interface_of(address: str) -> str:
    """The network interface that has the IPv4 `address`; empty if none says so (an alias, a container)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""

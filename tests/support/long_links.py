"""Nodes on long links: network namespaces whose packets a process hands on, so late and so fast as it is told.

For kernels without netem. Each node has a TUN device; what it sends waits for its link, for that of the node it goes
to, and for the way between them. The devices take and give whole trains of segments (TSO), so TCP sees an MTU of 1500
and this process few packets. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import shaped_links
from shaped_links import Links

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 1, 2
_HEADER = 10  # bytes of virtio_net_hdr, before those of IP
_LONGEST = 65536 + _HEADER
_QUEUE_S = 0.05  # of what waits for a link; more is dropped


def available() -> bool:
    return shaped_links.available() and os.path.exists("/dev/net/tun")


class LongLinks(Links):
    """The namespaces of some nodes, and the process that hands their packets on."""

    def make_long(self, mbits: float, one_way_s: float) -> None:
        """`mbits`: of each node's link, in each direction. `one_way_s`: from any node to any other."""
        names = [f"{self._tag}t{index}" for index, _ in enumerate(self.nodes)]
        spec = {self.address(node): name for node, name in zip(self.nodes, names, strict=True)}
        words = [sys.executable, __file__, json.dumps(spec), str(mbits), str(one_way_s)]
        self._relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == b"ready\n"
        for node, device in zip(self.nodes, names, strict=True):
            space = self._name(node)
            shaped_links.run("ip", "netns", "add", space)
            shaped_links.run("ip", "-n", space, "link", "set", "lo", "up")
            shaped_links.run("ip", "link", "set", device, "netns", space, "name", "eth0")
            shaped_links.run("ip", "-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            shaped_links.run("ip", "-n", space, "link", "set", "eth0", "up")

    def counts(self) -> dict[str, dict[str, int]]:
        """End the relay; return what it handed on."""
        out, _ = self._relay.communicate()
        return json.loads(out)

    def remove(self) -> None:
        if getattr(self, "_relay", None) is not None and self._relay.poll() is None:
            self._relay.communicate()  # it ends with its input
        for node in self.nodes:
            shaped_links.run("ip", "netns", "del", self._name(node), check=False)


@contextmanager
def long(nodes: Sequence[str], mbits: float, one_way_s: float) -> Iterator[LongLinks]:
    """Nodes that exist as long as the block."""
    links = LongLinks(nodes)
    try:
        links.make_long(mbits, one_way_s)
        yield links
    finally:
        links.remove()


class Relay:
    """Hand packets on between devices, by the virtual clocks of their links."""

    def __init__(self, devices: dict[str, str], mbits: float, one_way_s: float) -> None:
        self._rate = mbits * 1e6 / 8
        self._delay = one_way_s
        self._device = {bytes(map(int, address.split("."))): _open(name) for address, name in devices.items()}
        self._out_free = dict.fromkeys(self._device.values(), 0.0)
        self._in_free = dict.fromkeys(self._device.values(), 0.0)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self.packets = 0
        self.dropped = 0

    def run(self) -> None:
        """Until standard input ends."""
        sources = [0, *self._device.values()]
        while True:
            pause = max(self._waiting[0][0] - time.monotonic(), 0) if self._waiting else None
            ready, _, _ = select.select(sources, [], [], pause)
            if 0 in ready:
                return
            for device in ready:
                self._take(device)
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, device, packet = heapq.heappop(self._waiting)
                os.write(device, packet)

    def _take(self, source: int) -> None:
        packet = os.read(source, _LONGEST)
        target = self._device.get(packet[_HEADER + 16 : _HEADER + 20])
        if packet[_HEADER] >> 4 != 4 or target is None:
            return  # IPv6, multicast
        now = time.monotonic()
        seconds = (len(packet) - _HEADER) / self._rate
        left = max(now, self._out_free[source]) + seconds
        there = max(left, self._in_free[target] + seconds)
        if there - now > _QUEUE_S + seconds:
            self.dropped += 1
            return
        self._out_free[source], self._in_free[target] = left, there
        self.packets += 1
        heapq.heappush(self._waiting, (there + self._delay, self.packets, target, packet))


def _open(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
    fcntl.ioctl(device, TUNSETIFF, request)
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def main() -> None:
    relay = Relay(json.loads(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    print("ready", flush=True)
    relay.run()
    print(json.dumps({"packets": relay.packets, "dropped": relay.dropped}), flush=True)


if __name__ == "__main__":
    main()

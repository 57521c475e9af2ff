"""Nodes on long links: network namespaces whose packets a process hands on, so late and so fast as it is told.

For kernels without netem. Each node has a TUN device; what it sends waits for its link, for that of the node it goes
to, and for the way between them. The devices take and give whole trains of segments (TSO), so TCP sees an MTU of 1500
and this process few packets. Needs root and /dev/net/tun.

Devices and namespaces have no names outside of that process: they end with it, and it ends with its parent, however
that ends. Most of its time is the kernel's, which receives the packets in it: in C it takes as long. `slower` stretches
all times of a network, so that it does what it would on a machine with as many times more processors.
"""

from __future__ import annotations

import ctypes
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
from contextlib import contextmanager, suppress

import shaped_links
from shaped_links import Links

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 1, 2
_HEADER = 10  # bytes of virtio_net_hdr, before those of IP
_LONGEST = 65536 + _HEADER
_QUEUE_S = 0.05  # of what waits for a link; more is dropped
_CLONE_NEWNET = 0x40000000


def available() -> bool:
    return shaped_links.available() and os.path.exists("/dev/net/tun")


class LongLinks(Links):
    """The namespaces of some nodes, and the process that hands their packets on and has these."""

    def make_long(self, mbits: float, one_way_s: float, slower: float) -> None:
        """`mbits`: of each node's link, in each direction. `one_way_s`: from any node to any other."""
        spec = {"addresses": [self.address(node) for node in self.nodes]}
        spec |= {"rate": mbits * 1e6 / 8 / slower, "delay_s": one_way_s * slower, "queue_s": _QUEUE_S * slower}
        words = [sys.executable, __file__, json.dumps(spec)]
        self._relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # Whatever else runs on this machine, a packet is late by what it was told.
        os.sched_setscheduler(self._relay.pid, os.SCHED_FIFO, os.sched_param(1))
        assert self._relay.stdout is not None
        self._spaces = dict(zip(self.nodes, json.loads(self._relay.stdout.readline()), strict=True))

    def inside(self, node: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._relay.pid}/fd/{self._spaces[node]}"]

    def counts(self) -> dict[str, float]:
        """End the relay; return what it handed on, and its seconds of a CPU."""
        out, _ = self._relay.communicate()
        return json.loads(out)

    def remove(self) -> None:
        if getattr(self, "_relay", None) is not None and self._relay.poll() is None:
            self._relay.communicate()  # it ends with its input


@contextmanager
def long(nodes: Sequence[str], mbits: float, one_way_s: float, slower: float = 1) -> Iterator[LongLinks]:
    """Nodes that exist as long as the block."""
    links = LongLinks(nodes)
    try:
        links.make_long(mbits, one_way_s, slower)
        yield links
    finally:
        links.remove()


class Relay:
    """Hand packets on between devices, by the virtual clocks of their links."""

    def __init__(self, addresses: Sequence[str], rate: float, delay_s: float, queue_s: float) -> None:
        """`rate`: of a link in each direction, bytes/s. `queue_s`: of what waits for one; more is dropped."""
        self._rate, self._delay, self._queue = rate, delay_s, queue_s
        made = [_node(address) for address in addresses]
        self.spaces = [space for space, _ in made]
        self._device = {
            bytes(map(int, address.split("."))): device for address, (_, device) in zip(addresses, made, strict=True)
        }
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
        if there - now > self._queue + seconds:
            self.dropped += 1
            return
        self._out_free[source], self._in_free[target] = left, there
        self.packets += 1
        heapq.heappush(self._waiting, (there + self._delay, self.packets, target, packet))


def _node(address: str) -> tuple[int, int]:
    """Make a namespace without a name, with one device; return the descriptors of both."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    space, device = os.open("/proc/self/ns/net", os.O_RDONLY), _device()
    shaped_links.run("ip", "link", "set", "lo", "up")
    shaped_links.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
    shaped_links.run("ip", "link", "set", "eth0", "up")
    if libc.setns(home, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(home)
    return space, device


def _device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def main() -> None:
    relay = Relay(**json.loads(sys.argv[1]))
    print(json.dumps(relay.spaces), flush=True)
    relay.run()
    with suppress(BrokenPipeError):  # nobody is left who would read it
        print(json.dumps({"packets": relay.packets, "dropped": relay.dropped, "cpu_seconds": time.process_time()}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()

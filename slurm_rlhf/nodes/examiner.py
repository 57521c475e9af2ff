"""Examine a node for the conductor: collect its facts, try to reach others, take part in measurements."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from msgspec import convert

from slurm_rlhf.cluster.network import address_towards, addresses, is_loopback, listening
from slurm_rlhf.nodes.collect import collect
from slurm_rlhf.nodes.environment import visible_gpus, without_injected
from slurm_rlhf.nodes.facts import Introduction, NodeFacts, Orders, Reach
from slurm_rlhf.placement.topology import Topology
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys

_PROBES = 16  # connections that are tried at a time


class Examiner:
    """Looks at the node of an agent, and takes part in measurements.

    The thread that calls `introduce` lives as long as the agent: a process that imports torch ends with it. Other
    threads may call the rest.
    """

    def __init__(self, orders: Orders, node: str) -> None:
        self._orders = orders
        self._node = node
        self._secret = RunKeys.parse(orders.keys, "the agent's orders").client_secret
        self._listening: socket.socket | None = None  # for the store of a group, and for others to reach
        self._host: GroupHost | None = None

    def introduce(self) -> Introduction:
        """Get ready for measurements. Raises OSError and PlacementError."""
        own = address_towards(self._orders.address)
        self._listening = listening(own)
        self._host = GroupHost(self._listening) if self._orders.groups else None
        return Introduction(own, self._listening.getsockname()[1], time.time())

    def facts(self, peers: Mapping[str, int]) -> NodeFacts:
        """Say what is known of this node, and whether it reaches others; `peers`: node -> port of its agent."""
        return replace(collect(self._orders, self._node, os.environ), reached=reach(peers, timeouts.CONNECT_S))

    def groups(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start a process for each seat of `order`; return the reports of all of them."""
        assert self._host is not None, "the orders said nothing of groups"
        return list(self._host.run({**order, "secret": self._secret}, os.environ))

    def close(self) -> None:
        """End what it has started; the node is examined."""
        if self._listening is not None:
            self._listening.close()
        if self._host is not None:
            self._host.end()
        self._listening = self._host = None


def reach(peers: Mapping[str, int], timeout_s: float) -> tuple[Reach, ...]:
    """Connect to other nodes by their names; `peers`: node -> port at which its agent listens."""
    if not peers:
        return ()
    with ThreadPoolExecutor(min(_PROBES, len(peers))) as threads:
        return tuple(threads.map(lambda node: _reach(node, peers[node], timeout_s), peers))


def _reach(node: str, port: int, timeout_s: float) -> Reach:
    try:
        found = socket.getaddrinfo(node, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Reach(node, "", error.strerror or str(error))
    address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
    try:
        socket.create_connection((address, port), timeout_s).close()
    except ConnectionRefusedError:
        pass  # an answer: the node is there, and its agent listens on another of its addresses
    except OSError as error:
        return Reach(node, address, error.strerror or str(error))
    return Reach(node, address, "")


class GroupHost:
    """Start `group_rank` on this node; importing torch takes seconds, in which other checks go on.

    `listening`: where the store of a group listens if this node has it.
    """

    def __init__(self, listening: socket.socket) -> None:
        reading, writing = os.pipe()  # not its output: libraries print into that
        self._address = str(listening.getsockname()[0])
        self._reports = os.fdopen(reading, encoding="utf-8")
        fds = (listening.fileno(), writing)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slurm_rlhf.nodes.group_rank", *map(str, fds), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            env={**without_injected(os.environ), **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")},
            text=True,
        )
        os.close(writing)

    def run(self, order: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Let the seats of `order` go through their stages; yield their reports until all have ended."""
        interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        named = [] if is_loopback(self._address) else [str(own) for name, own in addresses() if name == interface]
        address = [*named, self._address][0]
        place = convert(order["place"], Topology)
        node = place.nodes[0].name
        seats = [[seat, slot, visible_gpus(place, node, [slot], environ)] for seat, slot in order["seats"]]
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(json.dumps({**order, "seats": seats, "address": address}) + "\n")
            self._process.stdin.flush()
        for line in self._reports:
            if (report := json.loads(line)) == {"end": True}:
                return
            yield report
        said = self._process.stderr.read().strip().splitlines() or ["without a word"]
        error = f"the process that imports torch has ended: {said[-1]}"
        mine = {seat for seat, _ in order["seats"]}
        for name, members in (group for stage in order["stages"] for group in stage):
            yield from ({"seat": seat, "group": name, "error": error} for seat in mine.intersection(members))

    def end(self) -> None:
        """End the process and what it started."""
        with self._process, self._reports:
            self._process.kill()  # its seats go with it

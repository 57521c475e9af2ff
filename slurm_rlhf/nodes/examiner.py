"""Examine a node for the conductor: collect its facts, try to reach others, measure links and groups."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from slurm_rlhf.cluster.network import address_of, address_towards, is_loopback, listening
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.nodes.collect import collect
from slurm_rlhf.nodes.environment import visible_gpus, without_injected
from slurm_rlhf.nodes.facts import Introduction, NodeFacts, Orders, Reach
from slurm_rlhf.placement.topology import Node, Topology
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys

_PROBES = 16  # connections that are tried at a time
_MESSAGE = 1 << 20  # most bytes between an agent and the process that has imported torch


class Examiner:
    """Looks at the node of an agent, and takes part in measurements.

    The thread that calls `introduce` lives as long as the agent: a process that imports torch ends with it. Other
    threads may call the rest.
    """

    def __init__(self, orders: Orders, node: str) -> None:
        self._orders = orders
        self._node = node
        self._secret = RunKeys.parse(orders.keys, "the agent's orders").client_secret
        self._sockets: list[socket.socket] = []  # for links, and for the store of a group
        self._host: GroupHost | None = None

    def introduce(self) -> Introduction:
        """Get ready for measurements. Raises OSError and PlacementError."""
        own = address_towards(self._orders.address)
        self._sockets = [listening(own) for _ in range(2)]
        answer_links(self._sockets[0], self._secret, self._orders.limit_s)
        self._host = GroupHost() if self._orders.groups else None
        links, store = (each.getsockname()[1] for each in self._sockets)
        return Introduction(own, links, store, time.time())

    def facts(self, peers: Mapping[str, int]) -> NodeFacts:
        """Say what is known of this node, and whether it reaches others; `peers`: node -> port of its agent."""
        return replace(collect(self._orders, self._node, os.environ), reached=reach(peers, timeouts.CONNECT_S))

    def link(self, address: str, port: int) -> dict[str, Any]:
        """Measure the link to another agent; `error` says why that failed."""
        try:
            return measure(address, port, self._secret, self._orders.limit_s / 4)
        except OSError as error:
            return {"error": error.strerror or str(error)}

    def groups(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start a process for each seat of `order`; return the reports of all of them."""
        assert self._host is not None, "the orders said nothing of groups"
        return list(self._host.run({**order, "secret": self._secret}, self._sockets[1], os.environ))

    def close(self) -> None:
        """End what it has started; the node is examined."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # whoever waits for a guest wakes up
            each.close()
        if self._host is not None:
            self._host.end()
        self._sockets, self._host = [], None

    def print_facts(self, problem: str) -> None:
        """Print the facts for the launcher to bring: the conductor cannot be reached because of `problem`."""
        found = collect(self._orders, self._node, os.environ)
        print(json.dumps({"facts": asdict(replace(found, conductor=problem))}), flush=True)


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
        return Reach(node, "", "", error.strerror or str(error))
    address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
    try:
        name = socket.gethostbyaddr(address)[0]
    except OSError:
        name = ""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except ConnectionRefusedError:
        pass  # an answer: the node is there, and its agent listens on another of its addresses
    except OSError as error:
        return Reach(node, address, name, error.strerror or str(error))
    return Reach(node, address, name, "")


class GroupHost:
    """Start `group_rank` on this node; importing torch takes seconds, in which other checks go on."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slurm_rlhf.nodes.group_rank", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**without_injected(os.environ), **one_thread},
        )
        theirs.close()
        self._socket = ours

    def run(
        self, order: Mapping[str, Any], listening: socket.socket, environ: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Let the seats of `order` go through their stages; yield their reports until all have ended.

        `listening`: where the store of the group listens if this node has it.
        """
        address = str(listening.getsockname()[0])
        interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if interface and not is_loopback(address):
            try:
                address = address_of(interface, "GLOO_SOCKET_IFNAME")
            except ConfigError as error:
                yield from self._all(order, str(error))
                return
        self._socket.settimeout(order["limit_s"] + timeouts.PREFLIGHT_S)
        place = Topology((Node(order["node"], order["gpus"], 0, tuple(order["devices"])),), order["accelerator"])
        seats = [[seat, slot, visible_gpus(place, order["node"], [slot], environ)] for seat, slot in order["seats"]]
        message = json.dumps({**order, "seats": seats, "address": address}).encode()
        try:
            socket.send_fds(self._socket, [message], [listening.fileno()])
            while (said := self._socket.recv(_MESSAGE)) and (report := json.loads(said)) != {"end": True}:
                yield report
            if not said:
                yield from self._all(order, f"the process that imports torch has ended: {self._last_words()}")
        except OSError as error:
            yield from self._all(order, f"the process that imports torch says nothing: {error.strerror or error}")

    def end(self) -> None:
        """End the process and what it started."""
        self._socket.close()
        self._process.kill()  # its seats go with it
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    @staticmethod
    def _all(order: Mapping[str, Any], error: str) -> Iterator[dict[str, Any]]:
        """Report the same error of every seat in every group."""
        mine = {seat for seat, _ in order["seats"]}
        for stage in order["stages"]:
            for name, seats in stage:
                for seat in mine.intersection(seats):
                    yield {"seat": seat, "group": name, "error": error}


SIZE = 2 << 20
"""Bytes that go each way."""
_PIECE = 1 << 16
_PINGS = 5
_ENOUGH_S = 0.5  # limit of repeating: a slow link is not measured again
_REPEATS = 3
_NUMBER = 16  # bytes
_PROOF = hashlib.sha256().digest_size


def answer_links(listening: socket.socket, secret: str, timeout_s: float) -> None:
    """Answer the other ends of links at a listening socket, each in a thread, until that is closed."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                guest, _ = listening.accept()
                threading.Thread(target=_answer, args=(guest, secret, timeout_s), daemon=True).start()

    threading.Thread(target=serve, name="link-answers", daemon=True).start()


def _answer(guest: socket.socket, secret: str, timeout_s: float) -> None:
    """Do the other half of `measure`. Strangers, and those who only tried to connect, are hung up on."""
    with guest, suppress(OSError):
        guest.settimeout(timeout_s)
        number = secrets.token_bytes(_NUMBER)
        guest.sendall(number)
        if not hmac.compare_digest(_received(guest, _PROOF), _proof(secret, number)):
            return
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest.sendall(b".")
        while kind := guest.recv(1):
            if kind == b"p":
                guest.sendall(b".")
            elif kind == b"s":
                _receive(guest, SIZE)
                guest.sendall(b".")
                guest.sendall(bytes(SIZE))


def measure(address: str, port: int, secret: str, timeout_s: float) -> dict[str, Any]:
    """Return seconds of a round trip, of sending and of receiving. Raises OSError."""
    with socket.create_connection((address, port), timeout_s) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(_proof(secret, _received(link, _NUMBER)))
        _receive(link, 1)
        pings = sorted(_took(link, b"p", 1) for _ in range(_PINGS))
        found: list[tuple[float, float]] = []
        begun = time.monotonic()
        while len(found) < _REPEATS and time.monotonic() - begun < _ENOUGH_S:
            there = _took(link, b"s" + bytes(SIZE), 1)
            start = time.monotonic()
            _receive(link, SIZE)
            found.append((there, time.monotonic() - start))
    return {
        "latency_s": pings[_PINGS // 2],
        "there_s": min(there for there, _ in found),
        "back_s": min(back for _, back in found),
        "size": SIZE,
    }


def _proof(secret: str, number: bytes) -> bytes:
    """Answer a fresh number with the secret of both ends."""
    return hmac.digest(secret.encode(), number, "sha256")


def _took(link: socket.socket, data: bytes, answer: int) -> float:
    start = time.monotonic()
    link.sendall(data)
    _receive(link, answer)
    return time.monotonic() - start


def _received(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = link.recv(count - len(found))
        if not data:
            raise ConnectionError("the other end hung up")
        found += data
    return found


def _receive(link: socket.socket, count: int) -> None:
    """Read and forget `count` bytes."""
    while count:
        count -= len(_received(link, min(count, _PIECE)))

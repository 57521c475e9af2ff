"""The conductor's end: a socket at which agents say who they are, and lines of JSON both ways.

Nobody gets in who does not answer a fresh number with the run's secret; nothing that arrives is anything but JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.wire import timeouts

_LONGEST = 64 << 20  # bytes of a line
_LONGEST_PROOF = 4096
_BACKLOG = 4096


def proof(secret: str, number: str, node: str) -> str:
    """Answer the desk's number."""
    return hmac.new(secret.encode(), f"{number} {node}".encode(), hashlib.sha256).hexdigest()


def encode(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass(slots=True)
class _Guest:
    socket: socket.socket
    number: str
    asked: float  # time.time() when the number was sent
    read: bytes = b""
    node: str = ""  # empty: not proved yet


class Desk:
    """Listen on `address` alone, at a port that the system chooses. Used from one thread. Raises OSError."""

    def __init__(self, address: str, secret: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.address = address
        self.port = int(self._listening.getsockname()[1])
        self.refused = 0
        """Connections without the secret."""
        self.skews: dict[str, float] = {}
        """Node -> seconds by which its clock is ahead, as far as the measurement is certain."""
        self._secret = secret
        self._choice = selectors.DefaultSelector()
        self._choice.register(self._listening, selectors.EVENT_READ)
        self._guests: dict[str, _Guest] = {}

    @property
    def nodes(self) -> list[str]:
        """Return the nodes whose agent is connected."""
        return list(self._guests)

    def poll(self, timeout_s: float) -> list[tuple[str, Any]]:
        """Return (node, message) for what has arrived, waiting for it at most `timeout_s`."""
        news: list[tuple[str, Any]] = []
        for key, _ in self._choice.select(timeout_s):
            if key.fileobj is self._listening:
                self._let_in()
            else:
                news += self._hear(key.data)
        return news

    def send(self, node: str, message: Any) -> None:
        """Send to the agent of `node`; one that is gone, or reads nothing for 5 s, is dropped."""
        guest = self._guests.get(node)
        if guest is not None:
            try:
                guest.socket.sendall(encode(message))
            except OSError:
                self._drop(guest)

    def close(self) -> None:
        """Close everything; the agents end."""
        for key in list(self._choice.get_map().values()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            self._choice.unregister(sock)
            sock.close()
        self._choice.close()

    def _let_in(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        connection.settimeout(timeouts.PREFLIGHT_S)
        guest = _Guest(connection, secrets.token_hex(16), time.time())
        with contextlib.suppress(OSError):
            connection.sendall(encode({"number": guest.number}))
        self._choice.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> list[tuple[str, Any]]:
        try:
            data = guest.socket.recv(1 << 16)
        except OSError:
            data = b""
        guest.read += data
        if not data or len(guest.read) > (_LONGEST if guest.node else _LONGEST_PROOF):
            self._drop(guest)
            return []
        *lines, guest.read = guest.read.split(b"\n")
        news = []
        for line in lines:
            message = _parsed(line)
            if guest.node or self._admit(guest, message):
                news.append((guest.node, message))
            else:
                self._drop(guest)
                break
        return news

    def _admit(self, guest: _Guest, message: Any) -> bool:
        fields = message if isinstance(message, dict) else {}
        node, clock = str(fields.get("node", "")), fields.get("clock")
        wanted = proof(self._secret, guest.number, node)
        if not node or not hmac.compare_digest(wanted, str(fields.get("proof", ""))) or not isinstance(clock, float):
            return False
        heard = time.time()
        middle, open_s = (guest.asked + heard) / 2, (heard - guest.asked) / 2
        ahead = clock - middle
        self.skews[node] = ahead - min(open_s, abs(ahead)) * (1 if ahead > 0 else -1)
        guest.node = node
        self._guests[node] = guest
        return True

    def _drop(self, guest: _Guest) -> None:
        if not guest.node:
            self.refused += 1
        elif self._guests.get(guest.node) is guest:
            del self._guests[guest.node]
        with contextlib.suppress(KeyError, ValueError):
            self._choice.unregister(guest.socket)
        guest.socket.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None

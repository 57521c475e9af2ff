"""Measure the link between two nodes over a plain connection: latency, and the rate in both directions. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time
from typing import Any

SIZE = 2 << 20
"""Bytes that go each way."""
_PIECE = 1 << 16
_PINGS = 5
_ENOUGH_S = 0.5  # limit of repeating: a slow link is not measured again
_REPEATS = 3
_NUMBER = 16  # bytes
_PROOF = hashlib.sha256().digest_size


class Answerer:
    """Answer the other ends of links at a listening socket, each in a thread, until that is closed."""

    def __init__(self, listening: socket.socket, secret: str, timeout_s: float) -> None:
        self._listening = listening
        self._secret = secret
        self._timeout_s = timeout_s
        threading.Thread(target=self._serve, name="link-answers", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                guest, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(guest,), daemon=True).start()

    def _answer(self, guest: socket.socket) -> None:
        """Do the other half of `measure`. Strangers, and those who only tried to connect, are hung up on."""
        with guest, contextlib.suppress(OSError):
            guest.settimeout(self._timeout_s)
            number = secrets.token_bytes(_NUMBER)
            guest.sendall(number)
            if not hmac.compare_digest(_received(guest, _PROOF), _proof(self._secret, number)):
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

"""Messages between the conductor and a worker: lines of JSON, over a socket that the worker inherits.

JSON, because rows of data have integers of any size, and texts that are no valid Unicode.
"""

from __future__ import annotations

import json
import socket
from typing import Any

LARGEST = 1 << 28
"""Bytes of a message at most."""


class Channel:
    """Sends and receives plain values; arrays and tensors arrive as lists."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self._lines = connected, connected.makefile("rb")

    def send(self, value: Any) -> None:
        """Send a value. Raises TypeError or ValueError for one that has no JSON or is too large, and OSError."""
        text = packed(value).encode() + b"\n"
        if len(text) > LARGEST:
            raise ValueError(f"a message of {len(text) / 2**20:.0f} MiB; {LARGEST / 2**20:.0f} MiB are the most")
        self.socket.sendall(text)

    def receive(self) -> Any:
        """Wait for a value; a part of one that came by the socket's time-out is lost.

        Raises TimeoutError, EOFError or ConnectionError when the other side has ended, ValueError for what is no value.
        """
        line = self._lines.readline(LARGEST)
        if not line.endswith(b"\n"):
            raise ValueError(f"a message of {len(line)} bytes") if line else EOFError
        return json.loads(line)

    def close(self) -> None:
        """Close this end."""
        self._lines.close()
        self.socket.close()


def packed(value: Any) -> str:
    """Write a value as JSON. Raises TypeError or ValueError for one that has none."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot go to another process: use plain values")

"""Messages between the conductor and a worker: JSON behind its length, over a socket that the worker inherits.

JSON, because rows of data have integers of any size, and texts that are no valid Unicode.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LARGEST = 1 << 28
"""Bytes of a message at most."""
_LENGTH = struct.Struct(">I")


class Channel:
    """Sends and receives plain values; arrays and tensors arrive as lists."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._held = bytearray()

    def send(self, value: Any) -> None:
        """Send a value. Raises TypeError or ValueError for one that has no JSON or is too large, and OSError."""
        text = packed(value).encode()
        if len(text) > LARGEST:
            raise ValueError(f"a message of {len(text) / 2**20:.0f} MiB; {LARGEST / 2**20:.0f} MiB are the most")
        self.socket.sendall(_LENGTH.pack(len(text)) + text)

    def receive(self) -> Any:
        """Wait for a value, as long as the socket's time-out; what came of it by then is kept.

        Raises TimeoutError, EOFError when the other side has ended, ValueError for what is no message.
        """
        while (value := self._first()) is None:
            try:
                piece = self.socket.recv(1 << 16)
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError
            self._held += piece
        return value[0]

    def _first(self) -> list[Any] | None:
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > LARGEST:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        text = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        return [json.loads(text)]


def packed(value: Any) -> str:
    """Write a value as JSON. Raises TypeError or ValueError for one that has none."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot go to another process: use plain values")

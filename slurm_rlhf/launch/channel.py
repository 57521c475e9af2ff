"""Lines of JSON between the conductor and the process that started it."""

from __future__ import annotations

import json
import socket
from typing import Any


class Channel:
    """One end of a pair of sockets. `receive` never blocks; `send` does as long as the other end does not read."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._read = b""
        self.closed = False
        """True once the other end is gone."""

    def send(self, **words: Any) -> None:
        """Nothing happens when the other end is gone."""
        try:
            self._end.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived, oldest first."""
        while not self.closed:
            try:
                data = self._end.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            self._read += data
        *lines, self._read = self._read.split(b"\n")
        return [json.loads(line) for line in lines]

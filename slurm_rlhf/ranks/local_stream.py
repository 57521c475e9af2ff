"""Streams of messages between processes on one node: Unix sockets that no other user can open."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from slurm_rlhf.errors import CallTimeout, RoleDied, WireError
from slurm_rlhf.wire.codec import MAX_FRAME_BYTES, MAX_FRAMES, decode, encode

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class LocalListener:
    """Listens in a directory of its own, which only this user can enter."""

    def __init__(self, backlog: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="listen-")
        self.path = os.path.join(self._directory.name, "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(backlog)

    def accept(self, timeout_s: float) -> LocalStream:
        """Wait for the next process that connects. Raises CallTimeout."""
        self._socket.settimeout(max(timeout_s, 1e-3))
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise CallTimeout(f"nobody connected to {self.path} within {timeout_s:g} s") from None
        return LocalStream(connection)

    def close(self) -> None:
        """Stop listening and leave nothing on the disk; connections stay."""
        self._socket.close()
        self._directory.cleanup()


def connect_local(path: str, timeout_s: float) -> LocalStream:
    """Connect to the listener at `path`. Raises RoleDied when there is none, or it is another user's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise RoleDied(f"nobody listens at {path}: {error}") from error
    return LocalStream(connection)


class LocalStream:
    """Sends and receives what `codec` carries; notices at once when the process at the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises WireError when the other end is another user's."""
        connection.settimeout(None)
        self._connection = connection
        self._sending = threading.Lock()
        self._closed = False
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        self.pid, user, _ = _PEER.unpack(peer)
        if user != os.getuid():
            connection.close()
            raise WireError(f"process {self.pid} of user {user} connected to a socket of user {os.getuid()}")

    def send(self, value: Any) -> None:
        """Send a message, from any thread; blocks while the peer does not read. Raises RoleDied when it is gone."""
        frames = encode(value)
        sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
        head = _COUNT.pack(len(frames)) + b"".join(map(_LENGTH.pack, sizes))
        try:
            with self._sending:
                self._connection.sendall(b"".join((head, *frames)))
        except OSError as error:
            raise RoleDied(f"process {self.pid} is gone: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next message; not after `listen`. Raises CallTimeout, RoleDied at the end, WireError."""
        self._connection.settimeout(timeout_s)
        try:
            (count,) = _COUNT.unpack(self._read(_COUNT.size))
            if not 0 < count <= MAX_FRAMES:
                raise WireError(f"process {self.pid} sent a message of {count} frames")
            sizes = [_LENGTH.unpack(self._read(_LENGTH.size))[0] for _ in range(count)]
            if max(sizes) > MAX_FRAME_BYTES:
                raise WireError(f"process {self.pid} sent a frame of {max(sizes)} bytes")
            return decode([memoryview(self._read(size)) for size in sizes])
        except TimeoutError:
            raise CallTimeout(f"process {self.pid} sent nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise RoleDied(f"process {self.pid} is gone: {error}") from error
        finally:
            if not self._closed:
                self._connection.settimeout(None)

    def listen(self, on_message: Callable[[Any], None], on_end: Callable[[Exception], None]) -> None:
        """Start a thread that hands every message to `on_message`, and in the end the reason to `on_end`.

        `on_end` is not called after `close` of this end.
        """

        def read() -> None:
            try:
                while True:
                    on_message(self.receive())
            except Exception as error:
                if not self._closed:
                    on_end(error)

        threading.Thread(target=read, name=f"local-stream-{self.pid}", daemon=True).start()

    def close(self) -> None:
        """Close the connection; the other end notices."""
        self._closed = True
        with contextlib.suppress(OSError):  # the peer was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._connection.recv_into(view[got:])
            if not count:
                raise RoleDied(f"process {self.pid} is gone: it closed its end")
            got += count
        return data


def accept_all(listener: LocalListener, wanted: set[int], timeout_s: float) -> dict[int, LocalStream]:
    """Accept everybody in `wanted`; each sends its number first. Raises CallTimeout naming who is missing."""
    end = time.monotonic() + timeout_s
    streams: dict[int, LocalStream] = {}
    while missing := wanted - set(streams):
        try:
            stream = listener.accept(end - time.monotonic())
            number = stream.receive(max(end - time.monotonic(), 1e-3))
        except CallTimeout:
            raise CallTimeout(f"rank {sorted(missing)} did not connect within {timeout_s:g} s") from None
        if number not in missing:
            raise WireError(f"process {stream.pid} says it is rank {number!r}; expected one of {sorted(missing)}")
        streams[number] = stream
    return streams

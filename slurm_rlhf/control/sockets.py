"""Options that every control socket shares."""

from __future__ import annotations

from typing import Any

import zmq

from slurm_rlhf.control.codec import MAX_FRAME_BYTES

_HANDSHAKE_MS = 30_000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000
# Frames shorter than this are copied by pyzmq: cheaper than keeping track of their owner.
_COPY_BELOW_BYTES = 64 << 10


def make_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """A socket without message limits other than a frame's size: what is in flight is bounded by the callers."""
    socket = context.socket(kind)
    socket.copy_threshold = _COPY_BELOW_BYTES
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.reconnect_ivl = _RECONNECT_MS
    socket.reconnect_ivl_max = _RECONNECT_MAX_MS
    socket.tcp_keepalive = 1
    return socket

"""What every control socket shares: its options, and frames that are safe to send."""

from __future__ import annotations

from typing import Any

import zmq

from slurm_rlhf.control.codec import MAX_FRAME_BYTES, Buffer

Part = bytes | zmq.Frame

_HANDSHAKE_MS = 30_000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000


def make_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """A socket without message limits other than a frame's size: what is in flight is bounded by the callers."""
    socket = context.socket(kind)
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.reconnect_ivl = _RECONNECT_MS
    socket.reconnect_ivl_max = _RECONNECT_MAX_MS
    socket.tcp_keepalive = 1
    return socket


def to_parts(frames: list[Buffer]) -> list[Part]:
    """Frames that own their bytes: what they were made of may change as soon as this returns.

    One copy, in the thread that makes the message. pyzmq could send the arrays' own memory, but then it frees that
    memory at the interpreter's exit while ZeroMQ still reads it: processes crash in their last moment.
    """
    return [frame if isinstance(frame, bytes) else zmq.Frame(frame, copy=True) for frame in frames]

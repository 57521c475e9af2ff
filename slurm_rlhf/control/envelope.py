"""The first frame of every message: its kind, its number, and the call it belongs to.

Both directions of a connection number their calls, replies, errors and events 1, 2, 3, ... All other messages carry
the number of the last one before them. So the receiver sees a message that came twice, and within one heartbeat
that one was lost with a broken connection; no call waits an hour for an answer that cannot come.

From a rank: hello (again until welcomed), beat, pulse (with its phase), reply, error, event, bye.
From the conductor: welcome, taken (another process has that rank), beat, pulse, call, lost (you were given up), bye.

Every rank has two connections, told apart by the first byte of their routing id. Pulses have one to themselves, so
that they are not stuck behind 100 MB of log-probs; all else goes over the other, where a beat follows what was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from slurm_rlhf.control.codec import Buffer, decode
from slurm_rlhf.errors import WireError

NUMBERED = frozenset({"call", "reply", "error", "event"})
KINDS = NUMBERED | {"hello", "welcome", "taken", "beat", "pulse", "lost", "bye"}
MAIN_LANE, PULSE_LANE = b"m", b"p"
_MAX_BYTES = 64


@dataclass(frozen=True, slots=True)
class Envelope:
    kind: str
    number: int
    call: int = 0

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb((self.kind, self.number, self.call))
        return packed

    def order(self, received: int) -> Literal["next", "replayed", "gap"]:
        """How this message follows the last numbered one that was `received`."""
        expected = received + (self.kind in NUMBERED)
        if self.number == expected:
            return "next"
        return "replayed" if self.number < expected else "gap"


def unpack(frames: Sequence[Buffer]) -> tuple[Envelope, Sequence[Buffer]]:
    """The envelope of a message and the frames of its body. Raises WireError."""
    if not frames or len(frames[0]) > _MAX_BYTES:
        raise WireError("a message without an envelope")
    try:
        kind, number, call = msgpack.unpackb(frames[0])
    except Exception as error:
        raise WireError(f"an envelope does not decode: {type(error).__name__}: {error}") from error
    if not isinstance(kind, str) or kind not in KINDS or not _is_count(number) or not _is_count(call):
        raise WireError(f"no envelope of ours: {str((kind, number, call))[:80]}")
    return Envelope(kind, number, call), frames[1:]


def body(frames: Sequence[Buffer]) -> dict[str, Any]:
    """The body of a message that has one: always a dict. Raises WireError."""
    value = decode(frames)
    if not isinstance(value, dict):
        raise WireError(f"a message's body is a {type(value).__name__}, not a dict")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63

"""The messages between conductor and ranks: their envelope, the calls and failures in them, and who sends them.

Both directions of a connection number their calls, replies, errors and events 1, 2, 3, ... All other messages carry
the number of the last one before them. So the receiver notices a message that came twice, and within one heartbeat a
message that was lost with a broken connection: no call waits an hour for an answer that cannot come.

From a rank: hello (again until welcomed), beat, pulse (with its phase), reply, error, event, bye.
From the conductor: welcome, taken (another process has that rank), beat, pulse, call, lost (you were given up), bye.

Every rank has two connections; the first byte of the routing id says which one it is. Pulses have one to themselves, so
that they do not wait behind 100 MB of log-probs. All other messages use the other one, where beats show what was lost.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, msgpack

from slurm_rlhf.errors import RemoteError, RunError, SlurmRlhfError, UserError, WireError, system_cause
from slurm_rlhf.records import Record
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.codec import Buffer, Reader, decode, encode
from slurm_rlhf.wire.io_thread import Part

NUMBERED = frozenset({"call", "reply", "error", "event"})
Kind = Literal["call", "reply", "error", "event", "hello", "welcome", "taken", "beat", "pulse", "lost", "bye"]
Count = Annotated[int, Meta(ge=0)]
MAIN_LANE, PULSE_LANE = b"m", b"p"

TERMINATION = "termination"
"""Event: the rank got SIGTERM."""
FAILURE = "failure"
"""Event: the rank cannot go on; with the field `reason`."""

_MAX_ENVELOPE_BYTES = 1024
_MAX_CHARACTERS = 100_000


def sendable(text: str) -> str:
    """Escape characters that no message can carry: lone surrogates, as in a file name that is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


class Envelope(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Starts every message: its kind, its number, the call that it belongs to, and a name.

    The name is a call's method, an event's name, a pulse's phase, or who holds a rank that is taken.
    """

    kind: Kind
    number: Count
    call: Count = 0
    name: str = ""

    def pack(self) -> bytes:
        return msgpack.encode(self)

    def order(self, received: int) -> Literal["next", "replayed", "gap"]:
        """Say how this message follows the last numbered one that was `received`."""
        expected = received + (self.kind in NUMBERED)
        if self.number == expected:
            return "next"
        return "replayed" if self.number < expected else "gap"


_decoder = msgpack.Decoder(Envelope)


def unpack(frames: Sequence[Buffer]) -> tuple[Envelope, Sequence[Buffer]]:
    """Split a message into its envelope and the frames of its body. Raises WireError."""
    if not frames or len(frames[0]) > _MAX_ENVELOPE_BYTES:
        raise WireError("a message without an envelope")
    try:
        return _decoder.decode(frames[0]), frames[1:]
    except (ValueError, RecursionError) as error:
        raise WireError(f"an envelope does not decode: {error}") from error


class CallFailure(Record):
    """Carries an exception from a rank to the conductor."""

    type: str
    message: str
    traceback: str
    user_error: bool
    hang: bool = False

    @classmethod
    def of(cls, error: BaseException) -> CallFailure:
        """Describe `error`, with the last part of a long traceback."""
        kind, message = type(error).__name__, str(error)[:_MAX_CHARACTERS]
        cause = system_cause(f"{kind}: {message}")
        return cls(
            kind,
            sendable(message + f" ({cause})" * bool(cause)),
            sendable("".join(traceback.format_exception(error))[-_MAX_CHARACTERS:]),
            isinstance(error, UserError) or (isinstance(error, RemoteError) and error.user_error),
            isinstance(error, SlurmRlhfError) and error.hang,
        )

    def raised(self, peer: Peer, method: str) -> RemoteError:
        """Make the error that the call's Future raises. A user's error keeps its own words."""
        text = self.message if self.user_error else f"{method} failed on {peer}: {self.type}: {self.message}"
        return RemoteError(
            text,
            remote_traceback=self.traceback,
            user_error=self.user_error,
            hang=self.hang,
            role=peer.role,
            node=peer.host,
        )


Send = Callable[[Kind, list[Buffer], int], None]


@dataclass(slots=True)
class Request:
    """Brings a call of the conductor to a rank; answer it once, from any thread, at any time."""

    method: str
    frames: Sequence[Buffer] = field(repr=False)
    """The argument, encoded."""
    id: int
    send: Send = field(repr=False)
    """(kind, body frames, id) into the client's outbox."""
    answered: bool = False
    failed: bool = False  # the answer was an error

    def argument(self, declared: Any = Any) -> Any:
        """Decode the argument as what is `declared`. Raises WireError."""
        return decode(self.frames, declared, f"the argument of {self.method}")

    def reply(self, result: Any = None) -> None:
        """Send the result. Does not block; arrays of `result` may change as soon as this returns.

        Raises WireError when `result` cannot be encoded; the request is then still open, for `fail`.
        """
        self._answer("reply", encode(result))

    def fail(self, error: BaseException) -> None:
        """Let the caller's Future raise RemoteError with the name, message and traceback of `error`."""
        self.failed = True
        self._answer("error", encode(CallFailure.of(error)))

    def answer_with(self, work: Callable[[], Any]) -> None:
        """Answer with the result of `work`, or with its exception."""
        try:
            self.reply(work())
        except Exception as error:
            self.fail(error)

    def answer_apart(self, work: Callable[[], Any]) -> None:
        """Do `answer_with` in a thread of its own."""
        threading.Thread(target=self.answer_with, args=(work,), name=self.method, daemon=True).start()

    def _answer(self, kind: Kind, frames: list[Buffer]) -> None:
        if self.answered:
            raise RunError(f"{self.method} (call {self.id}) has been answered already")
        self.answered = True
        self.send(kind, frames, self.id)


@dataclass(frozen=True, slots=True)
class Said:
    """Describes a message that was sent or received; heartbeats are none."""

    when: float  # seconds since the epoch
    peer: Peer
    what: str  # "call train_step", "reply to train_step"


@dataclass(slots=True, eq=False)
class Peer:
    """Stands for a process of a role. A rank that comes back after it was lost is another Peer."""

    role: str
    rank: int
    world: int
    host: str
    pid: int
    phase: str = ""
    """Its phase, as of its last pulse."""
    lost: str = ""
    """Reason for which it counts as gone; empty while it does not."""
    silent: bool = False
    """Whether it is lost because it sent no heartbeat."""
    route: bytes = field(default=b"", repr=False)
    heard: float = field(default=0.0, repr=False)
    """Time of its last message, on the server's clock."""
    sent: int = field(default=0, repr=False)
    received: int = field(default=0, repr=False)
    backlog: deque[list[Part]] = field(default_factory=deque, repr=False)
    """Messages to send when its broken connection is back."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host} (pid {self.pid})"


class Hello(Record):
    """Introduces a rank, as its first message."""

    role: str
    rank: int
    world: int
    host: str
    pid: int
    start: int = 0  # number of this start of the role, counted by the conductor

    def peer(self, route: bytes, now: float) -> Peer:
        """Make the peer at the other end of the connection `route`. Raises WireError."""
        if not self.role or not 0 <= self.rank < self.world:
            raise WireError(f"a hello that introduces nobody: {self}")
        return Peer(self.role, self.rank, self.world, self.host, self.pid, route=route, heard=now)


LOOKING = frozenset({"stacks", "written"})
"""Calls that change nothing: an answer to them does not show that the run makes progress."""


@dataclass(slots=True)
class Call:
    """Waits for the reply of a peer."""

    id: int
    peer: Peer
    method: str
    timeout_s: float
    read: Reader  # decodes the result
    since: float  # on the server's clock
    future: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Flight:
    """Describes a call that was not answered yet."""

    peer: Peer
    method: str
    seconds: float  # since it was sent
    timeout_s: float


class PendingCalls:
    """Finds calls by id and by deadline. Not locked: the server does that.

    A deadline is a limit on silence: it counts from the call, or from the peer's last reply to the same method if
    that is later. So many calls can be queued at one rank, and none expires while the rank works them off.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._last_reply: dict[tuple[Peer, str], float] = {}
        self.newest = 0  # id of the newest call

    def add(self, peer: Peer, method: str, timeout_s: float, read: Reader, now: float) -> Call:
        self.newest += 1
        call = Call(self.newest, peer, method, timeout_s, read, now)
        call.future.set_running_or_notify_cancel()
        self._calls[call.id] = call
        return call

    def answered(self, id: int, peer: Peer, now: float) -> Call | None:
        """Take the call that `peer` replied to; None: it was given up, or never made to this peer."""
        call = self._calls.get(id)
        if call is None or call.peer is not peer:
            return None
        self._last_reply[peer, call.method] = now
        return self._calls.pop(id)

    def expired(self, now: float) -> list[Call]:
        """Take the calls that are past their deadline."""
        heard = self._last_reply.get
        return self.take(lambda call: max(call.since, heard((call.peer, call.method), 0.0)) + call.timeout_s <= now)

    def flights(self, now: float) -> list[Flight]:
        """List the calls, the oldest first, except the calls `LOOKING`."""
        calls = [call for call in self._calls.values() if call.method not in LOOKING]
        return [Flight(call.peer, call.method, now - call.since, call.timeout_s) for call in calls]

    def take(self, which: Callable[[Call], bool]) -> list[Call]:
        """Take the calls for which `which` holds."""
        calls = [call for call in self._calls.values() if which(call)]
        for call in calls:
            del self._calls[call.id]
        return calls


log = logging.getLogger(__name__)


class Preemption:
    """Sends SIGUSR1, which saves and requeues, to this process once all ranks of a role got SIGTERM.

    If one rank alone got it, that is no preemption: somebody has signalled that process. Used by one thread.
    """

    def __init__(self) -> None:
        self._terminated: set[Peer] = set()
        self._noticed = False

    def note(self, peer: Peer, ranks: Iterable[Peer], count: int) -> None:
        """Note that `peer` got SIGTERM. If `count` of `ranks`, the present ranks of its role, got it: a preemption."""
        log.info("%s was asked to terminate", peer)
        self._terminated.add(peer)
        if not self._noticed and sum(each in self._terminated for each in ranks) == count:
            self._noticed = True
            threading.Timer(timeouts.PREEMPTION_S, os.kill, (os.getpid(), signal.SIGUSR1)).start()

"""Heartbeats between the members of a group.

A link that is cut tells nobody, and a long wait proves nothing: the engine at the other end may be loading. So a thread
of each member sends datagrams over the interface that carries the weights, whatever the member's other threads wait
for; where they stay out, the link is cut or the process hangs.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from slurm_rlhf.weights.rendezvous import Member

_PER_SILENCE = 10  # heartbeats in the time of silence that counts: that all of them are lost by chance is unlikely
_NODES = 64  # on which a member has partners, at most
_RANK = struct.Struct("<q")
_LONGEST = 64  # bytes; longer datagrams are not ours
_AT_ONCE = 10_000  # datagrams between two heartbeats of our own: a flood must not silence this member

OnSilence = Callable[[tuple[int, ...]], None]


def partners(members: Sequence[Member]) -> list[tuple[int, ...]]:
    """Return to whom each member sends heartbeats, by rank: rank 0 and all others, and one rank of each other node.

    So a link between two nodes is watched by some pair, whatever buckets it carries. With more than `_NODES` other
    nodes a member has partners on those next to its own in the roster only, which keeps the whole linear in the ranks:
    a node that is cut off is noticed by rank 0, a single bad link between two far ones by its time-outs.
    """
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member.rank)
    ring = list(nodes)
    reach = min(len(ring) // 2, _NODES // 2)
    sends: list[tuple[int, ...]] = [()] * len(members)
    for at, node in enumerate(ring):
        near = {(at + step) % len(ring) for step in range(-reach, reach + 1)} - {at}
        others = [nodes[ring[other]] for other in near]
        for place, rank in enumerate(nodes[node]):
            sends[rank] = tuple(sorted({0, *(ranks[place % len(ranks)] for ranks in others)}))
    sends[0] = tuple(range(1, len(members)))
    return sends


class Heartbeat:
    """Send and hear heartbeats: `start` it when the members are known, `close` it with the group.

    A peer is watched from its first heartbeat on. So where datagrams do not get through at all, nobody is suspected,
    and a cut link is found by the time-outs of the transfer.
    """

    def __init__(self, address: str, silence_s: float) -> None:
        """Open the port that the others send to. Raises OSError."""
        self.silence_s = silence_s
        self.expected: tuple[int, ...] = ()
        """Ranks whose heartbeats should come here."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self.port = int(self._socket.getsockname()[1])
        self._interval = silence_s / _PER_SILENCE
        self._token = b""
        self._message = b""
        self._targets: list[tuple[str, int]] = []
        self._heard: dict[int, float] = {}
        # Seconds in which this thread ran: those of a suspended process are not the others' silence.
        self._clock = 0.0
        self._armed = 0.0
        self._on_silence: OnSilence | None = None
        self._closing = threading.Event()
        self._started = False

    def start(self, members: Sequence[Member], rank: int, token: str) -> None:
        """Send to the partners of `rank`, and hear those whose partner it is. `token`: the group's own."""
        self._token = token.encode()
        self._message = self._token + _RANK.pack(rank)
        sends = partners(members)
        self._targets = [(members[other].address, members[other].heartbeat_port) for other in sends[rank]]
        self.expected = tuple(other for other, to in enumerate(sends) if rank in to)
        self._started = True
        threading.Thread(target=self._run, name="sync-heartbeat", daemon=True).start()

    @contextmanager
    def watched(self, on_silence: OnSilence) -> Iterator[None]:
        """Call `on_silence` once within the block, in another thread, with the peers not heard for `silence_s`."""
        self._armed, self._on_silence = self._clock, on_silence
        try:
            yield
        finally:
            self._on_silence = None

    @property
    def unheard(self) -> tuple[int, ...]:
        """Return the ranks whose heartbeats should come here, and never did."""
        return tuple(rank for rank in self.expected if rank not in self._heard)

    def close(self) -> None:
        self._closing.set()
        if not self._started:
            self._socket.close()

    def _run(self) -> None:
        with self._socket:
            last = time.monotonic()
            while not self._closing.is_set():
                for target in self._targets:
                    with suppress(OSError):  # no route, no buffer: it will be missed at the other end
                        self._socket.sendto(self._message, target)
                self._listen(last + self._interval)
                now = time.monotonic()
                self._clock += min(now - last, 2 * self._interval)
                last = now
                self._judge()

    def _listen(self, until: float) -> None:
        """Hear heartbeats until then, and whatever is there already: this process may have slept while they came."""
        for _ in range(_AT_ONCE):
            if self._closing.is_set():
                return
            left = until - time.monotonic()
            self._socket.settimeout(max(left, 0.0))
            try:
                found: Any = self._socket.recv(_LONGEST)
            except (TimeoutError, BlockingIOError):
                return
            except OSError:  # an unreachable peer's node has answered
                continue
            if found[: -_RANK.size] == self._token:
                self._heard[int(_RANK.unpack(found[-_RANK.size :])[0])] = self._clock

    def _judge(self) -> None:
        tell = self._on_silence
        if tell is None:
            return
        quiet = silent({rank: self._clock - max(at, self._armed) for rank, at in self._heard.items()}, self.silence_s)
        if quiet:
            self._on_silence = None
            tell(quiet)


def silent(ages: Mapping[int, float], limit_s: float) -> tuple[int, ...]:
    """Return the ranks that were not heard for longer than `limit_s`; none as long as more may belong to them.

    `ages`: rank -> seconds since its last heartbeat. A node that is cut off misses all others at about the same time,
    and is to name all of them: so who was not heard for half of the limit is waited for, up to half a limit more.
    """
    quiet = tuple(sorted(rank for rank, age in ages.items() if age > limit_s))
    doubtful = any(limit_s / 2 < age <= limit_s for age in ages.values())
    return () if doubtful and max(ages.values()) <= 1.5 * limit_s else quiet

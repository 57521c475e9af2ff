"""Signs of life between the members of a group. A link that is cut tells nobody, and a long wait proves nothing: the
engine at the other end may be loading. So a thread of each member sends datagrams over the interface that carries the
weights, whatever the member's other threads wait for; where they stay out, the link is cut or the process hangs.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from slurm_rlhf.sync.member import Member

_PER_SILENCE = 10  # pulses in the time of silence that counts: that all of them are lost by chance is unlikely
_RANK = struct.Struct("<q")
_LONGEST = 64  # bytes; longer datagrams are not ours

OnSilence = Callable[[tuple[int, ...]], None]


def partners(members: Sequence[Member], rank: int) -> tuple[int, ...]:
    """To whom `rank` sends pulses: rank 0 and all others each way, and one rank of each other node, near it in number.

    So whatever link between two nodes carries buckets, some pair watches it, and a pulse costs a member a datagram
    per node and not one per rank.
    """
    if rank == 0:
        return tuple(member.rank for member in members if member.rank)
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member.rank)
    mine = nodes.pop(members[rank].node)
    place = mine.index(rank)
    return tuple(sorted({0, *(ranks[place % len(ranks)] for ranks in nodes.values())}))


class Pulse:
    """A member's end: `start` it when the members are known, `close` it with the group.

    A peer is watched from its first pulse on. So where datagrams do not get through at all, nobody is suspected, and
    a cut link is found by the time-outs of the transfer.
    """

    def __init__(self, address: str, silence_s: float) -> None:
        """Opens the port that the others send to. Raises OSError."""
        self.silence_s = silence_s
        self.expected: tuple[int, ...] = ()
        """Ranks whose pulses should come here."""
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
        """Send to the `partners` of `rank`, and hear those whose partner it is. `token`: the group's own."""
        self._token = token.encode()
        self._message = self._token + _RANK.pack(rank)
        self._targets = [(members[other].address, members[other].pulse) for other in partners(members, rank)]
        self.expected = tuple(m.rank for m in members if m.rank != rank and rank in partners(members, m.rank))
        self._started = True
        threading.Thread(target=self._run, name="sync-pulse", daemon=True).start()

    @contextmanager
    def watched(self, on_silence: OnSilence) -> Iterator[None]:
        """Within it `on_silence` is called once, on the pulse's thread, with the peers not heard for `silence_s`."""
        self._armed, self._on_silence = self._clock, on_silence
        try:
            yield
        finally:
            self._on_silence = None

    @property
    def unheard(self) -> tuple[int, ...]:
        """Whose pulses should come here, and never did."""
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
        """Until then, and then whatever is there already: this process may have slept while they came."""
        while not self._closing.is_set():
            left = until - time.monotonic()
            self._socket.settimeout(max(left, 0.0))
            try:
                found: Any = self._socket.recv(_LONGEST)
            except (TimeoutError, BlockingIOError):
                return
            except OSError:  # what an unreachable peer's node answered
                continue
            if found[: -_RANK.size] == self._token:
                self._heard[int(_RANK.unpack(found[-_RANK.size :])[0])] = self._clock

    def _judge(self) -> None:
        tell = self._on_silence
        if tell is None:
            return
        quiet = [rank for rank, at in self._heard.items() if self._clock - max(at, self._armed) > self.silence_s]
        if quiet:
            self._on_silence = None
            tell(tuple(sorted(quiet)))

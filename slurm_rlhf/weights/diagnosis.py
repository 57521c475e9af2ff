"""Heartbeats between the members of a group, and who broke an update, from what the members write into the store.

A cut link raises no error, and a long wait proves nothing: the engine at the other end may be loading. So a thread of
each member sends datagrams over the interface that carries the weights, whatever the member's other threads wait for;
if they stop coming, the link is cut or the process hangs.

Backends only say that something closed or took too long. Every member that fails posts why, before it drops its
connections: a reason of its own, whom it has not heard from, or nothing when it merely lost the others. So a peer whose
connection closed without a post has died, and a peer that posts nothing hangs or is cut off. Rank 0 judges and
publishes; the others repeat its verdict.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import json
from torch.distributed import Store

from slurm_rlhf.errors import shortened
from slurm_rlhf.polling import in_thread, wait_until
from slurm_rlhf.records import Record
from slurm_rlhf.weights.rendezvous import Member, read
from slurm_rlhf.wire import timeouts

_PER_SILENCE = 10  # heartbeats in timeout.sync_silence: that all of them are lost by chance is unlikely
_NODES = 64  # most nodes on which a member has partners
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

    def start(self, members: Sequence[Member], rank: int, token: str) -> None:
        """Send to the partners of `rank`, and hear those whose partner it is. `token`: the group's own."""
        self._token = token.encode()
        self._message = self._token + _RANK.pack(rank)
        sends = partners(members)
        self._targets = [(members[other].address, members[other].heartbeat_port) for other in sends[rank]]
        self.expected = tuple(other for other, to in enumerate(sends) if rank in to)
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
        if not self._token:  # it was never started
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
            except OSError:  # a peer's node has answered that its port is closed
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
    """Return the ranks that were not heard for longer than `limit_s`; none while others may soon be among them.

    `ages`: rank -> seconds since its last heartbeat. A node that is cut off misses all others at about the same time,
    and should name all of them: so for a rank not heard for half of the limit it waits, up to half a limit more.
    """
    quiet = tuple(sorted(rank for rank, age in ages.items() if age > limit_s))
    doubtful = any(limit_s / 2 < age <= limit_s for age in ages.values())
    return () if doubtful and max(ages.values()) <= 1.5 * limit_s else quiet


_NAMED = 4  # most members that a message names


class Diagnosis(Record):
    """Say why an update ended."""

    text: str
    refused: bool = False  # a member gave a reason of its own, which a new group would not change
    silent: bool = False  # a member was not heard from, or did not answer


class Post(Record):
    """Say what a member knows of a failure."""

    reason: str = ""  # its own reason; empty: it lost the others
    quiet: tuple[int, ...] = ()  # members whose heartbeats did not come
    lost: str = ""  # the backend's message, if a connection closed


class FailureBoard:
    """Write and read the keys `failed/<rank>`, `refused` and `verdict` of a group's store.

    A store behind a cut link does not answer until TCP gives up, so its methods wait for little longer than
    timeouts.POST_S.
    """

    def __init__(self, store: Store, me: Member, timeout_s: float, silence_s: float) -> None:
        """`timeout_s`, `silence_s`: the group's, which messages name."""
        self._store = store
        self._me = me
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._posted = Post()
        self._cut_off = False  # the store does not answer; its client can do one thing at a time

    def post(self, reason: str = "", quiet: Sequence[int] = (), lost: str = "") -> None:
        """Say why this rank gave up; no reason: it lost the others. Keeps an earlier `quiet` and `lost`."""
        self._posted = Post(reason, tuple(quiet) or self._posted.quiet, lost or self._posted.lost)

        def write() -> None:
            self._store.set(f"failed/{self._me.rank}", json.encode(self._posted))
            if reason:
                self._store.set("refused", f"{self._me}: {reason}")

        self._within(timeouts.POST_S, write)

    def refusal(self) -> str | None:
        """Return who gave up for a reason of its own, and why; None if nobody did. Raises RuntimeError."""
        return read(self._store, "refused")

    def judge(self, members: Sequence[Member], left: Iterable[int], quiet: Sequence[int], lost: str = "") -> Diagnosis:
        """Decide at rank 0 what happened to the others. `left`: those whose connection closed; may grow meanwhile.

        `quiet`: those that rank 0 itself has not heard from; `lost`: see `Post`, its own.
        """
        peers = range(1, len(members))
        start = time.monotonic()
        while True:
            posts = {
                rank: json.decode(text, type=Post)
                for rank in peers
                if (text := read(self._store, f"failed/{rank}")) is not None
            }
            reasons = [f"{members[rank]}: {post.reason}" for rank, post in posts.items() if post.reason]
            dead = [str(members[rank]) for rank in sorted(left) if rank not in posts]
            waited = time.monotonic() - start
            if reasons:
                return Diagnosis("; ".join(reasons), refused=True)
            if dead and waited > timeouts.POST_CLOSED_S:
                return Diagnosis(f"{' and '.join(dead)} died: its connection closed without a message")
            if len(posts) == len(peers) or waited > timeouts.POST_S:
                break
            time.sleep(0.05)
        missing = {0: tuple(quiet)} | {rank: post.quiet for rank, post in posts.items()}
        if any(missing.values()):
            return Diagnosis(cut(missing, {0, *posts}, members, self._silence_s), silent=True)
        silent = [str(members[rank]) for rank in peers if rank not in posts]
        if not silent:
            said = next((text for text in [lost, *(post.lost for post in posts.values())] if text), "")
            broke = "the connections between the members broke, though all of them are alive"
            return Diagnosis(f"{broke}: {said}" if said else broke)
        return Diagnosis(
            f"no answer from {' and '.join(silent)} within {self._timeout_s:g} s (timeout.sync)", silent=True
        )

    def publish(self, verdict: Diagnosis) -> None:
        """Tell the other members what rank 0 found."""
        self._within(timeouts.POST_S, lambda: self._store.set("verdict", json.encode(verdict)))

    def verdict(self) -> Diagnosis | None:
        """Return what rank 0 found; None if it does not say so in time, and is probably gone or cut off itself."""

        def wait() -> Diagnosis | None:
            if wait_until(lambda: self._store.check(["verdict"]), timeouts.POST_S + 1.0):
                return json.decode(self._store.get("verdict"), type=Diagnosis)
            return None

        found: Diagnosis | None = self._within(timeouts.POST_S + 2.0, wait)
        return found

    def _within(self, seconds: float, work: Callable[[], Any]) -> Any:
        """Return what `work` returns; None where it takes longer, or the store's process is gone."""
        if self._cut_off:
            return None
        try:
            with suppress(RuntimeError):
                return in_thread(work, "sync-store").result(seconds)
        except TimeoutError:
            self._cut_off = True
        return None


def cut(quiet: Mapping[int, Sequence[int]], spoke: Collection[int], members: Sequence[Member], silence_s: float) -> str:
    """Say what silences mean. `quiet`: member -> whom it has not heard from; `spoke`: whose posts reached rank 0.

    Who is missed and says nothing is at fault; two that miss each other and can be heard have a bad link between them.
    """
    missed = sorted({rank for ranks in quiet.values() for rank in ranks})
    gone = [rank for rank in missed if rank not in spoke]
    for_so_long = f"for {silence_s:g} s (timeout.sync_silence)"
    if gone:
        witness = min(rank for rank, ranks in quiet.items() if set(ranks) & set(gone))
        if _alone(witness, gone, members):
            others = shortened(sorted({members[rank].node for rank in gone}), _NAMED)
            return (
                f"{members[witness].end} heard nothing from any other node ({others}) {for_so_long}: "
                "its own link is cut"
            )
        called = shortened([members[rank].end for rank in gone], _NAMED, " and ")
        return f"{members[witness].end} heard nothing from {called} {for_so_long}: its link is cut, or it hangs"
    one, other = next((rank, ranks[0]) for rank, ranks in sorted(quiet.items()) if ranks)
    return (
        f"{members[one].end} heard nothing from {members[other].end} {for_so_long}, though both are alive: the link "
        "between them is cut, or one of them stood still. Set sync.interface to a network that joins both nodes"
    )


def _alone(witness: int, gone: Collection[int], members: Sequence[Member]) -> bool:
    """Tell whether a member misses all members on several other nodes: then its own link is the cause."""
    away = [member for member in members if member.node != members[witness].node]
    return {member.rank for member in away} <= set(gone) and len({member.node for member in away}) > 1

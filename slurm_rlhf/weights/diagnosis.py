"""Find out who broke an update, from what the members write into the store.

Backends only say that something closed or took too long. Every member that fails posts why, before it drops its
connections: a reason of its own, whom it has not heard from, or nothing when it merely lost the others. So a peer whose
connection closed without a post has died, and a peer that posts nothing hangs or is cut off. Rank 0 judges and
publishes; the others repeat its verdict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from slurm_rlhf.errors import shortened
from slurm_rlhf.polling import in_thread, wait_until
from slurm_rlhf.weights.rendezvous import read
from slurm_rlhf.wire import timeouts

_NAMED = 4  # members that a message names; of a node that is cut off, all would be too many


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Say why an update ended."""

    text: str
    refused: bool = False  # a member gave a reason of its own, which a new group would not change
    silent: bool = False  # a member was not heard from, or did not answer


@dataclass(frozen=True, slots=True)
class Post:
    """Say what a member knows of a failure."""

    reason: str = ""  # its own reason; empty: it lost the others
    quiet: tuple[int, ...] = ()  # members whose heartbeats stayed out
    lost: str = ""  # the backend's words, where a connection closed


@dataclass(frozen=True, slots=True)
class Names:
    """Name the members in messages, by rank."""

    short: Mapping[int, str]
    ends: Mapping[int, str]  # their names as ends of a link: with interface and address
    timeout_s: float
    silence_s: float
    nodes: Mapping[int, str]  # the node of each


class FailureBoard:
    """Write and read the keys `failed/<rank>`, `refused` and `verdict` of a group's store.

    A store on the other side of a cut link answers nothing, for as long as TCP tries: nobody waits longer than the
    grace for it here.
    """

    def __init__(self, store: Store, rank: int, label: str) -> None:
        self._store = store
        self._rank = rank
        self._label = label
        self._posted = Post()
        self._cut_off = False  # the store does not answer; its client can do one thing at a time

    def post(self, reason: str = "", quiet: Sequence[int] = (), lost: str = "") -> None:
        """Say why this rank gave up; no reason: it lost the others. Keeps what it said before of others' silence."""
        self._posted = Post(reason, tuple(quiet) or self._posted.quiet, lost or self._posted.lost)

        def write() -> None:
            self._store.set(f"failed/{self._rank}", json.dumps(asdict(self._posted)))
            if reason:
                self._store.set("refused", f"{self._label}: {reason}")

        self._within(timeouts.POST_S, write)

    def refusal(self) -> str | None:
        """Return who gave up for a reason of its own, and why; None if nobody did. Raises RuntimeError."""
        return read(self._store, "refused")

    def judge(
        self, peers: Collection[int], left: Iterable[int], quiet: Sequence[int], names: Names, lost: str = ""
    ) -> Diagnosis:
        """Decide at rank 0 what happened to `peers`. `left`: those whose connection closed; may grow meanwhile.

        `quiet`: those that rank 0 itself has not heard from; `lost`: see `Post`, its own.
        """
        start = time.monotonic()
        while True:
            posts = {rank: _post(text) for rank in peers if (text := read(self._store, f"failed/{rank}")) is not None}
            reasons = [f"{names.short[rank]}: {post.reason}" for rank, post in posts.items() if post.reason]
            dead = [names.short[rank] for rank in sorted(left) if rank not in posts]
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
            return Diagnosis(cut(missing, {0, *posts}, names), silent=True)
        silent = [names.short[rank] for rank in sorted(peers) if rank not in posts]
        if not silent:
            said = next((text for text in [lost, *(post.lost for post in posts.values())] if text), "")
            broke = "the connections between the members broke, though all of them are alive"
            return Diagnosis(f"{broke}: {said}" if said else broke)
        return Diagnosis(
            f"no answer from {' and '.join(silent)} within {names.timeout_s:g} s (timeout.sync)", silent=True
        )

    def publish(self, verdict: Diagnosis) -> None:
        """Tell the other members what rank 0 found."""
        self._within(timeouts.POST_S, lambda: self._store.set("verdict", json.dumps(asdict(verdict))))

    def verdict(self) -> Diagnosis | None:
        """Return what rank 0 found; None if it does not say so in time, and is probably gone or cut off itself."""

        def wait() -> Diagnosis | None:
            if wait_until(lambda: self._store.check(["verdict"]), timeouts.POST_S + 1.0):
                return Diagnosis(**json.loads(read(self._store, "verdict") or "{}"))
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


def cut(quiet: Mapping[int, Sequence[int]], spoke: Collection[int], names: Names) -> str:
    """Say what silences mean. `quiet`: member -> whom it has not heard from; `spoke`: whose posts reached rank 0.

    Who is missed and says nothing is at fault; two that miss each other and can be heard have a bad link between them.
    """
    missed = sorted({rank for ranks in quiet.values() for rank in ranks})
    gone = [rank for rank in missed if rank not in spoke]
    for_so_long = f"for {names.silence_s:g} s (timeout.sync_silence)"
    if gone:
        witness = min(rank for rank, ranks in quiet.items() if set(ranks) & set(gone))
        if _alone(witness, gone, names):
            others = shortened(sorted({names.nodes[rank] for rank in gone}), _NAMED)
            return (
                f"{names.ends[witness]} heard nothing from any other node ({others}) {for_so_long}: its own link is cut"
            )
        called = shortened([names.ends[rank] for rank in gone], _NAMED, " and ")
        return f"{names.ends[witness]} heard nothing from {called} {for_so_long}: its link is cut, or it hangs"
    one, other = next((rank, ranks[0]) for rank, ranks in sorted(quiet.items()) if ranks)
    return (
        f"{names.ends[one]} heard nothing from {names.ends[other]} {for_so_long}, though both are alive: the link "
        "between them is cut, or one of them stood still. Set sync.interface to a network that joins both nodes"
    )


def _alone(witness: int, gone: Collection[int], names: Names) -> bool:
    """Tell whether a member misses everybody on several other nodes: then it is its own link that they share."""
    away = {rank for rank, node in names.nodes.items() if node != names.nodes[witness]}
    return away <= set(gone) and len({names.nodes[rank] for rank in away}) > 1


def _post(text: str) -> Post:
    said = json.loads(text)
    return Post(said["reason"], tuple(said["quiet"]), said["lost"])

"""Who broke an update. Transports only say that something closed or took too long; members say the rest in the store.

Every member that fails posts why, before it drops its connections: a reason of its own, or nothing when it merely
lost the others. So a peer whose connection closed without a post is the one that died, and a peer that posts nothing
after a time-out is the one that hangs. Rank 0 judges and publishes; the others repeat its verdict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from torch.distributed import Store

from slurm_rlhf.sync.store import read, wait_until

GRACE_S = 3.0
"""How long survivors have to post after a failure."""
_CLOSED_GRACE_S = 0.5
_LOST = "-"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an update ended."""

    text: str
    refused: bool = False  # a member gave a reason of its own, which a new group would not change


class FailureBoard:
    """Keys of a group's store: `failed/<rank>`, `refused` and `verdict`."""

    def __init__(self, store: Store, rank: int, label: str) -> None:
        self._store = store
        self._rank = rank
        self._label = label

    def post(self, reason: str = "") -> None:
        """Say why this rank gave up; nothing: it lost the others."""
        with suppress(RuntimeError):  # the store's process may be the one that is gone
            self._store.set(f"failed/{self._rank}", reason or _LOST)
            if reason:
                self._store.set("refused", f"{self._label}: {reason}")

    def refusal(self) -> str | None:
        """Who gave up of its own and why, for those who wait for it; None if nobody did. Raises RuntimeError."""
        return read(self._store, "refused")

    def judge(self, peers: Collection[int], left: Iterable[int], labels: dict[int, str], timeout_s: float) -> Verdict:
        """What happened to `peers`, for rank 0. `left`: those whose connection closed; may grow meanwhile."""
        start = time.monotonic()
        while True:
            posts = {rank: text for rank in peers if (text := read(self._store, f"failed/{rank}")) is not None}
            reasons = [f"{labels[rank]}: {text}" for rank, text in posts.items() if text != _LOST]
            dead = [labels[rank] for rank in sorted(left) if rank not in posts]
            waited = time.monotonic() - start
            if reasons:
                return Verdict("; ".join(reasons), refused=True)
            if dead and waited > _CLOSED_GRACE_S:
                return Verdict(f"{' and '.join(dead)} died: its connection closed without a word")
            if len(posts) == len(peers) or waited > GRACE_S:
                break
            time.sleep(0.05)
        silent = [labels[rank] for rank in sorted(peers) if rank not in posts]
        if not silent:
            return Verdict("the connections between the members broke, though all of them are alive")
        return Verdict(f"no answer from {' and '.join(silent)} within {timeout_s:g} s (timeout.sync)")

    def publish(self, verdict: Verdict) -> None:
        with suppress(RuntimeError):
            self._store.set("verdict", json.dumps(asdict(verdict)))

    def verdict(self) -> Verdict | None:
        """What rank 0 found, None if it does not say within its grace, and itself is probably gone."""
        with suppress(RuntimeError):
            if wait_until(lambda: self._store.check(["verdict"]), GRACE_S + 1.0):
                return Verdict(**json.loads(read(self._store, "verdict") or "{}"))
        return None

"""The end of the conductor: ranks say hello to it, calls go out, and replies come back as Futures."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

from slurm_rlhf.errors import CallTimeout, RoleDied, RunError, shortened
from slurm_rlhf.wire.codec import Reader, encode
from slurm_rlhf.wire.io_loop import IoLoop
from slurm_rlhf.wire.io_thread import CarefulLog, to_parts
from slurm_rlhf.wire.messages import Flight, Peer, Said

log = CarefulLog(logging.getLogger(__name__))


class ControlServer(IoLoop):
    """Calls ranks, and learns which of them are there.

    Any thread may use it. Its I/O thread does all sending and receiving; callbacks run on that thread, so they must
    return at once: while one runs, nobody is heard.

    Arrays of a call may change as soon as `call` returns; arrays of a reply are the caller's own.
    """

    def endpoint(self, host: str | None = None) -> str:
        """Return `tcp://host:port` for the ranks; `host` is their name for this node, None: what it listens on."""
        return f"tcp://{host or self._host}:{self.port}"

    def counts(self) -> str:
        """Describe for the log what came that should not have."""
        return (
            f"{self.auth.refused} connections refused, {self.garbage} messages of no use, {self.replayed} replayed, "
            f"{self.late} replies too late"
        )

    def peers(self, role: str) -> list[Peer]:
        """Return the ranks of `role` that said hello, in rank order, lost ones included (`peer.lost`)."""
        with self._lock:
            return self.roster.of_role(role)

    def peers_on(self, host: str) -> list[Peer]:
        """Return the newest peer of each rank that is on a node, lost ones included."""
        with self._lock:
            return [peer for peer in self.roster.by_name.values() if peer.host == host]

    def give_up(self, role: str, rank: int, why: str) -> None:
        """Count a rank as lost because its launcher or its conductor says so, a moment after this returns.

        Its calls fail with RoleDied, and another process may say hello in its place. `on_lost` is not called.
        """
        with self._lock:
            peer = self.roster.by_name.get((role, rank))
        if peer is not None and not peer.lost:
            self._given_up.put((peer, why))
            self._wakeup.signal()

    def silent(self, seconds: float) -> list[Peer]:
        """Return the ranks that are present and were not heard from for `seconds`, the most silent first."""
        now = self.now
        with self._lock:
            found = [peer for peer in self.roster.present() if now - peer.heard > seconds]
        return sorted(found, key=lambda peer: peer.heard)

    def flights(self) -> list[Flight]:
        """Return the calls in flight, the longest first; but for those that only look."""
        with self._lock:
            return self.pending.flights(self.now)

    def moves(self) -> int:
        """Count the answers and events of ranks so far: while it stays the same, none of them gets on."""
        return self._moves

    def said(self) -> list[Said]:
        """Return the last messages but heartbeats, the oldest first."""
        return list(self._said)

    def quiet(self, peer: Peer) -> float:
        """Return for how many seconds `peer` was not heard from."""
        return self.now - peer.heard

    def wait_for(self, role: str, n: int, timeout_s: float) -> list[Peer]:
        """Wait until ranks 0 .. n-1 of `role` have said hello; return them in rank order.

        Raises CallTimeout naming the missing ranks, RoleDied when one of them is lost, or what `fail_role` was given.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._raise_if_closed(role)
                if role in self._broken:
                    raise self._broken[role]
                here = [peer for peer in self.roster.of_role(role) if peer.rank < n]
                if lost := [peer for peer in here if peer.lost]:
                    raise RoleDied(f"{lost[0]} is lost: {lost[0].lost}", hang=lost[0].silent)
                if len(here) == n:
                    return here
                missing = sorted(set(range(n)) - {peer.rank for peer in here})
                if not self._lock.wait(end - time.monotonic()) and time.monotonic() >= end:
                    raise CallTimeout(
                        f"{role}: {len(here)} of {n} ranks said hello within {timeout_s:g} s; "
                        f"missing: {shortened(map(str, missing), 8)}; "
                        f"{self.auth.obstacle or 'their log files say why'}"
                    )

    def call(
        self,
        role: str,
        rank: int,
        method: str,
        argument: Any,
        timeout_s: float,
        read: Reader,
    ) -> Future[Any]:
        """Call a method of a rank with a record. Does not block; raises WireError when `argument` cannot be encoded.

        `read` decodes the Future's result, on the I/O thread, and raises nothing but WireError. The Future raises
        RemoteError (the handler raised), CallTimeout (no reply for `timeout_s` seconds since the call and since the
        rank's last reply to the same method), RoleDied (the rank was lost or is not there) or what `fail_role` was
        given. It cannot be cancelled.
        """
        parts = to_parts(encode(argument))
        with self._lock:
            self._raise_if_closed(role)
            peer = self.roster.by_name.get((role, rank))
            failure = self._broken.get(role) or self._absence(role, rank, peer)
            if failure is None and peer is not None:
                call = self.pending.add(peer, method, timeout_s, read, self.clock.now())
                self._said.append(Said(time.time(), peer, f"call {method}"))
                self._outbox.put((call, parts))
                self._wakeup.signal()
                return call.future
        future: Future[Any] = Future()
        future.set_exception(failure)
        return future

    def fail_role(self, role: str, error: Exception) -> None:
        """Break a role: its pending calls, all later ones and `wait_for` raise `error` (the first one given)."""
        with self._lock:
            error = self._broken.setdefault(role, error)
            calls = self.pending.take(lambda call: call.peer.role == role)
            self._lock.notify_all()
        for call in calls:
            call.future.set_exception(error)

    def starts(self, role: str) -> int:
        """Return how often `role` was dismissed: the number of its present start."""
        with self._lock:
            return self._starts.get(role, 0)

    def revive(self, role: str) -> None:
        """Take back what `fail_role` has said: the ranks of `role` can be called again."""
        with self._lock:
            self._broken.pop(role, None)

    def dismiss(self, role: str, reason: str) -> int:
        """Give up all ranks of `role` because it is started again; returns the number of that start.

        Whoever says hello with another number is refused, and old ranks that still send get the message to end.
        """
        with self._lock:
            self._broken.pop(role, None)
            dismissed = self.roster.dismiss(role, reason)
            calls = self.pending.take(lambda call: call.peer.role == role)
            number = self._starts[role] = self._starts.get(role, 0) + 1
        for call in calls:
            call.future.set_exception(RoleDied(f"{call.peer} is lost: {reason}"))
        log.info("%s: %d ranks are given up, start %d follows", role, len(dismissed), number)
        return number

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_if_closed(self, role: str) -> None:
        if self.closed:
            raise RunError(f"the control server is closed; {role} cannot be reached")

    def _absence(self, role: str, rank: int, peer: Peer | None) -> Exception | None:
        """Say why a rank cannot be called; None: it can."""
        if peer is None:
            ranks = shortened([str(other.rank) for other in self.roster.of_role(role)], 8)
            return RoleDied(f"{role} rank {rank} is not connected; connected ranks of {role}: {ranks or 'none'}")
        return RoleDied(f"{peer} is lost: {peer.lost}", hang=peer.silent) if peer.lost else None

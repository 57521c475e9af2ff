"""Which process groups of a run have died: in which order, how, and which of them by themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from slurm_rlhf.cluster.processes import exit_text, running, usual_cause
from slurm_rlhf.groups.first_failure import names_of
from slurm_rlhf.groups.start_logs import StartLogs
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.wire.calls import StartCalls
from slurm_rlhf.wire.roster import Peer

_BY_ITSELF = re.compile(
    r"\bkilled by SIG(KILL|SEGV|BUS|ILL|FPE)\b"
    r"|\bended: (Killed|Segmentation fault|Bus error|Illegal instruction|Floating point exception)\b"
)
"""How nobody ends because another is gone: that gives an error, SIGABRT (a library gives up) or SIGTERM."""

_STARTING = ("", StartCalls.start.__name__)
"""Phases of a rank before it has answered its first call."""


@dataclass(frozen=True, slots=True)
class RoleRanks:
    """Holds what is known of the ranks of a role."""

    role: str
    world: int
    peers: Sequence[Peer]  # that have said hello
    here: bool  # they are on this machine

    @property
    def gone(self) -> list[Peer]:
        """List the ranks whose process has ended; empty where another machine has them."""
        return [peer for peer in self.peers if self.here and not running(peer.pid)]

    @property
    def hurt(self) -> bool:
        return bool(self.gone)

    @property
    def unknown(self) -> bool:
        """Tell whether a rank has not said hello: nobody knows its process."""
        return len(self.peers) < self.world

    @property
    def starting(self) -> bool:
        """Tell whether a rank has not answered its first call."""
        return sum(not peer.lost and peer.phase not in _STARTING for peer in self.peers) < self.world


@dataclass(frozen=True, slots=True)
class Death:
    """Describes the end of a process group."""

    end: Ended
    how: str  # in words, with the rank that was first where that is known
    at: float  # when the first process of its role was seen to be gone, in seconds of some clock


def culprits(deaths: Sequence[Death]) -> list[Death]:
    """Return those that died by themselves, in the order of their deaths, one of each role.

    That is the first, and whoever was killed besides. Groups of one role end together, and whose peer is gone ends too,
    by an error of its own: those are not named. Of the groups of one role it is the one that was killed.
    """
    named: list[Death] = []
    for death in sorted(deaths, key=lambda one: (one.at, not _BY_ITSELF.search(one.how))):
        known = {one.end.role for one in named}
        if not named or (death.end.role not in known and _BY_ITSELF.search(death.how)):
            named.append(death)
    return named


class Deaths:
    """Keeps the ends of process groups, and when the first process of each role was seen to be gone.

    A torchrun ends after its other ranks have: of two roles that die within a second, the first may be seen to end
    last. Used by one thread.
    """

    def __init__(self, logs: StartLogs) -> None:
        self.ends: list[Ended] = []
        self._logs = logs
        self._at: dict[str, float] = {}
        self._first_end = 0.0

    def note(
        self, ends: Sequence[Ended], known: Sequence[RoleRanks], stopped: Sequence[tuple[str, int]], now: float
    ) -> None:
        """Note what was seen at `now`: groups that have ended since, and all roles.

        `stopped`: role and process id of the torchruns that a signal has stopped: those do not end when a rank does.
        """
        hurt, still = {one.role: one for one in known if one.hurt}, dict(stopped)
        ended = {end.role for end in (*self.ends, *ends)}
        fresh = [*ends, *(self._end_of(one, still[role]) for role, one in hurt.items() if role in still.keys() - ended)]
        if fresh and not self.ends:
            self._first_end = now
        self.ends += fresh
        for role in (*hurt, *(end.role for end in ends)):
            self._at.setdefault(role, now)

    def _end_of(self, ranks: RoleRanks, torchrun: int) -> Ended:
        node = ranks.gone[0].host
        how = f"has lost a process, which its torchrun (pid {torchrun}) does not see: it is stopped by a signal"
        return Ended(ranks.role, node, how, self._logs.of_torchrun(ranks.role, node))

    def forget(self, roles: Collection[str]) -> None:
        """Forget the ends of roles that are started again."""
        self.ends = [end for end in self.ends if end.role not in roles]
        self._at = {role: at for role, at in self._at.items() if role not in roles}

    def waited_s(self, now: float) -> float:
        """Return the seconds since the first end; 0.0 while there is none."""
        return now - self._first_end if self.ends else 0.0

    def more_to_come(self, waited_s: float, known: Sequence[RoleRanks], patience_s: float, limit_s: float) -> bool:
        """Tell whether a role may have died that has not been seen to end, `waited_s` after the first that was.

        One of which a process is gone will end, within `limit_s`. For one with ranks that have not said hello, so that
        nobody knows whether they are gone, `patience_s` is enough.
        """
        ended = {end.role for end in self.ends}
        limits = [
            limit_s if one.role in self._at else patience_s * one.unknown for one in known if one.role not in ended
        ]
        return waited_s < max(limits, default=0.0)

    @property
    def sure(self) -> bool:
        """Tell whether a torchrun has reported a rank that died by itself: the death of a node is not behind that."""
        failed = [self._logs.first_failure(end.role, node) for end in self.ends for node in names_of(end.node)]
        return any(one is not None and _BY_ITSELF.search(exit_text(one.exitcode)) for one in failed)

    def verdict(self, known: Sequence[RoleRanks], name: Callable[[Peer], str]) -> tuple[Ended, str]:
        """Return the group that died first, and how it and the others did which died by themselves.

        `name`: of a rank, in words.
        """
        of = {one.role: one for one in known}
        deaths = [
            Death(end, _describe(end, of.get(end.role), self._logs, name), self._at[end.role]) for end in self.ends
        ]
        first, *others = culprits(deaths)
        return first.end, "; ".join([first.how, *(f"role {one.end.role} died: {one.how}" for one in others)])


def _describe(end: Ended, ranks: RoleRanks | None, logs: StartLogs, name: Callable[[Peer], str]) -> str:
    """Say how a group ended, by the report of its torchrun, or else by which of its ranks are gone."""
    peers = ranks.peers if ranks else []
    for node in names_of(end.node):
        failed = logs.first_failure(end.role, node)
        if failed is not None:
            same = [peer for peer in peers if (peer.host, peer.pid) == (node, failed.pid)]
            who = name(same[0]) if same else f"rank {failed.rank}"
            how = exit_text(failed.exitcode) + usual_cause(failed.exitcode)
            return f"{who} on {node} (pid {failed.pid}) {how}"
    gone = [peer for peer in (ranks.gone if ranks else []) if peer.host == end.node]
    told = ", ".join(f"{name(peer)} (pid {peer.pid})" for peer in gone)
    return f"its process group on {end.node} {end.how}" + (f"; gone: {told}" if told else "")


class Standstills:
    """Measures how long torchruns have stood still at a stretch. Used by one thread."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}

    def longer_than(
        self, limit_s: float, stopped: Sequence[tuple[str, int]], known: Sequence[RoleRanks], now: float
    ) -> list[tuple[str, str]]:
        """Return (role, what is wrong) of those that have stood still for longer while their role starts.

        `stopped`: role and process id of the torchruns that a signal has stopped, at `now` seconds of some clock.
        """
        starting = {one.role for one in known if one.starting}
        self._since = {(role, pid): self._since.get((role, pid), now) for role, pid in stopped if role in starting}
        return [
            (
                role,
                f"its torchrun (pid {pid}), which its ranks need to start, has stood still for {now - since:.0f} s: "
                "stopped by a signal",
            )
            for (role, pid), since in self._since.items()
            if now - since > limit_s
        ]

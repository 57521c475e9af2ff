"""Finds out what broke a run: which process groups have died, how, in which order, and on which nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from slurm_rlhf.cluster.processes import exit_text, running, usual_cause
from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.config.schema import Timeout
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.groups.start_logs import StartLogs
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.placement.rank_map import NodeShare
from slurm_rlhf.wire.calls import StartCalls
from slurm_rlhf.wire.messages import Peer

_BY_ITSELF = re.compile(
    r"\bkilled by SIG(KILL|SEGV|BUS|ILL|FPE)\b"
    r"|\bended: (Killed|Segmentation fault|Bus error|Illegal instruction|Floating point exception)\b"
)
"""Ends that are never caused by the end of another process: that gives an error, SIGABRT (a library) or SIGTERM."""

_STARTING = ("", StartCalls.start.__name__)
"""Phases of a rank before it has answered its first call."""


@dataclass(frozen=True, slots=True)
class FailedRole:
    """Says which role broke a run."""

    role: str
    nodes: tuple[str, ...] = ()  # the nodes where it may have failed; empty: not known
    silent: bool = False  # True: nothing was heard of it, so that its node may be gone


@dataclass(frozen=True, slots=True)
class RoleRanks:
    """Holds what is known of the ranks of a role."""

    role: str
    world: int
    peers: Sequence[Peer]  # ranks that have said hello
    here: bool  # True: the ranks are on this machine

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
    how: str  # the end in words, with the rank that ended first if that is known
    at: float  # time at which the first process of its role was seen to be gone, in seconds of some clock


def culprits(deaths: Sequence[Death]) -> list[Death]:
    """Return the deaths that no other death has caused, in their order, one for each role.

    These are the first death, and all processes that were killed. The groups of one role end together, and a group
    that loses its peers ends too, by an error of its own: such ends are left out. For a role with several ended groups
    the one that was killed is returned.
    """
    named: list[Death] = []
    for death in sorted(deaths, key=lambda one: (one.at, not _BY_ITSELF.search(one.how))):
        known = {one.end.role for one in named}
        if not named or (death.end.role not in known and _BY_ITSELF.search(death.how)):
            named.append(death)
    return named


class Deaths:
    """Keeps the ends of process groups, and when the first process of each role was seen to be gone.

    A torchrun ends after its other ranks: if two roles die within a second, the first one may be seen to end last.
    Used by one thread.
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

        `stopped`: role and process id of the torchruns that a signal has stopped. They do not end when a rank does.
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
        """Tell whether a role may have died whose end was not seen yet, `waited_s` after the first end.

        A role with a process that is gone will end within `limit_s`. For a role with ranks that have not said hello, so
        that nobody knows whether they live, `patience_s` is enough.
        """
        ended = {end.role for end in self.ends}
        limits = [
            limit_s if one.role in self._at else patience_s * one.unknown for one in known if one.role not in ended
        ]
        return waited_s < max(limits, default=0.0)

    @property
    def sure(self) -> bool:
        """Tell whether a torchrun has reported a rank that was killed: then the cause is not the death of a node."""
        failed = [self._logs.first_failure(end.role, node) for end in self.ends for node in names_of(end.node)]
        return any(one is not None and _BY_ITSELF.search(exit_text(one.exitcode)) for one in failed)

    def verdict(self, known: Sequence[RoleRanks], name: Callable[[Peer], str]) -> tuple[Ended, str]:
        """Return the group that died first, and a text that says how it and other killed groups died.

        `name`: names a rank for the user.
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
    names = ", ".join(f"{name(peer)} (pid {peer.pid})" for peer in gone)
    return f"its process group on {end.node} {end.how}" + (f"; gone: {names}" if names else "")


class Standstills:
    """Measures for how long torchruns have been stopped without a break. Used by one thread."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}

    def longer_than(
        self, limit_s: float, stopped: Sequence[tuple[str, int]], known: Sequence[RoleRanks], now: float
    ) -> list[tuple[str, str]]:
        """Return (role, problem) of torchruns that were stopped for longer than `limit_s` while their role starts.

        `stopped`: role and process id of the torchruns that a signal has stopped at `now`, in seconds of some clock.
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


def names_of(nodes: str) -> list[str]:
    """List the nodes of an `Ended`; another launcher may have written something that is no list."""
    try:
        return expand(nodes)
    except PlacementError:
        return [nodes]


def conductor_stood_still(absence_s: Callable[[float], float], timeout: Timeout) -> str:
    """Say that ranks ended because the conductor was away; empty: they wait longer than it was.

    `absence_s`: how long it was, if that is no longer ago than so many seconds.
    """
    seconds = absence_s(timeout.heartbeat)
    if seconds < timeout.heartbeat - timeout.heartbeat_interval:
        return ""
    return (
        f"the conductor stood still for {seconds:.0f} s (stopped by a signal, or its machine was suspended), and the "
        f"ranks, which wait for {timeout.heartbeat:g} s (timeout.heartbeat), left: all are gone, not one role"
    )


def unheard(
    shares: Sequence[NodeShare],
    here: Collection[int],
    hosts: Collection[str],
    unreached: Callable[[Sequence[str]], Collection[str]],
) -> list[NodeShare]:
    """Return the parts of a role on dead nodes, where ranks did not say hello in time; empty: it is not known which.

    `here`: the ranks that did. `hosts`: nodes of which any rank of any role is heard now: one that was heard before may
    have died since. Torchruns wait for each other, so ranks are missing on good nodes as well; the dead one is the only
    one of which nobody at all is heard. Where several are, `unreached` tells those where nothing can be started.
    """
    silent = [share for share in shares if {*share.ranks} - {*here} and share.node not in hosts]
    if len(silent) > 1:
        gone = unreached([share.node for share in silent])
        return [share for share in silent if share.node in gone]
    return silent if hosts else []


def heard_nodes(peers: Collection[Peer], quiet: Collection[Peer]) -> set[str]:
    """Return the nodes of which some rank is heard. `quiet`: those of `peers` that were not heard lately."""
    return {peer.host for peer in peers if not peer.lost and peer not in quiet}


def silent_nodes(peers: Collection[Peer], quiet: Collection[Peer], dead: Collection[str] = ()) -> set[str]:
    """Return the nodes of which no rank is heard any more, or ever was: those in `dead`.

    A rank that was killed says nothing of its node, and neither does one that has not said hello yet: it may import.
    """
    return {*dead, *(peer.host for peer in peers if peer.silent or peer in quiet)} - heard_nodes(peers, quiet)

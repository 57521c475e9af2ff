"""Finds out what broke a run: which process groups have died, how, in which order, and which nodes are not heard.

When a node dies, only its silence tells of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cluster.processes import exit_text, running, usual_cause
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.nodes.launcher import Ended, names_in
from slurm_rlhf.observe.log_tail import FailedProcess, first_failure, quoted
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Peer

_BY_ITSELF = re.compile(
    r"\bkilled by SIG(KILL|SEGV|BUS|ILL|FPE)\b"
    r"|\bended: (Killed|Segmentation fault|Bus error|Illegal instruction|Floating point exception)\b"
)
"""Ends that the end of another process never causes: it leads to an error, to SIGABRT by a library, or to SIGTERM."""

_LINES = 12  # lines of a log that an error quotes


class StartLogs:
    """Name the logs of each process of a run, and read them from where the present start began to write."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.mark()

    def mark(self) -> None:
        """Begin a start: what was written before does not count for it."""
        self._sizes = {path: _seen(path)[1] for path in self._directory.logs.glob("*.log")}

    def of_ranks(self, role: str, node: str, ranks: Iterable[int]) -> list[Path]:
        """Name the logs of ranks on a node: those from before they knew their rank, and those from after."""
        return [self._directory.role_log(role, node, name) for rank in ranks for name in (rank, f"{rank}.start")]

    def of_role(self, role: str) -> list[Path]:
        """List the logs of all ranks of a role, and of its torchruns."""
        logs = self._directory.logs
        return [*logs.glob(f"{role}.*.[0-9]*.log"), *logs.glob(f"{role}.*torchrun.log")]

    def of_end(self, end: Ended) -> list[Path]:
        """List the logs that may say why a process group ended: what its ranks have written, or else the whole role."""
        own = self._written(self._directory.logs.glob(f"{end.role}.{end.node}.[0-9]*.log"))
        return own or [*self.of_role(end.role), end.log]

    def first_failure(self, role: str, node: str) -> FailedProcess | None:
        """Return the rank that failed first by the report of its torchrun; None if there is none."""
        log = self._directory.role_log(role, node, "torchrun")
        return first_failure(log, self._sizes.get(log, 0))

    def quote(self, logs: Sequence[Path]) -> str:
        """Quote the end of the newest of `logs`."""
        newest = max(self._written(logs), key=_seen, default=logs[-1])
        return quoted(newest, _LINES, self._sizes.get(newest, 0))

    def _written(self, logs: Iterable[Path]) -> list[Path]:
        return [log for log in logs if _seen(log)[1] > self._sizes.get(log, 0)]


def _seen(log: Path) -> tuple[float, int]:
    """Return when a file was written, and its size; zeros where there is none, or its file system does not answer."""
    try:
        found = log.stat()
    except OSError:
        return 0.0, 0
    return found.st_mtime, found.st_size


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

    def note(self, ends: Sequence[Ended], known: Sequence[RoleRanks], now: float) -> None:
        """Note what was seen at `now`: groups that have ended since, and all roles."""
        if ends and not self.ends:
            self._first_end = now
        self.ends += ends
        for role in (*(one.role for one in known if one.gone), *(end.role for end in ends)):
            self._at.setdefault(role, now)

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
        left = [one for one in known if one.role not in ended]
        limits = [limit_s if one.role in self._at else patience_s * (len(one.peers) < one.world) for one in left]
        return waited_s < max(limits, default=0.0)

    @property
    def sure(self) -> bool:
        """Tell whether a torchrun has reported a rank that was killed: then the cause is not the death of a node."""
        failed = [self._logs.first_failure(end.role, node) for end in self.ends for node in names_in(end.node)]
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
    for node in names_in(end.node):
        failed = logs.first_failure(end.role, node)
        if failed is not None:
            same = [peer for peer in peers if (peer.host, peer.pid) == (node, failed.pid)]
            who = name(same[0]) if same else f"rank {failed.rank}"
            how = exit_text(failed.exitcode) + usual_cause(failed.exitcode)
            return f"{who} on {node} (pid {failed.pid}) {how}"
    gone = [peer for peer in (ranks.gone if ranks else []) if peer.host == end.node]
    names = ", ".join(f"{name(peer)} (pid {peer.pid})" for peer in gone)
    return f"its process group on {end.node} {end.how}" + (f"; gone: {names}" if names else "")


SILENT_BEATS = 3  # heartbeats missed in a row from which on a rank counts as silent


class Silence:
    """Looks for silent ranks among those of a run."""

    def __init__(self, server: ControlServer, roles: Collection[str], timeout: Timeout) -> None:
        self._server = server
        self._roles = roles
        self._timeout = timeout

    @property
    def patience_s(self) -> float:
        """Return how long it takes to see that a rank is silent."""
        return max(timeouts.VERDICT_S, (SILENT_BEATS + 1) * self._timeout.heartbeat_interval)

    @property
    def enough_s(self) -> float:
        """Return the seconds of silence that are evidence of a death, once something else has failed, too."""
        return self._timeout.heartbeat / 2

    def ranks(self, seconds: float | None = None) -> list[Peer]:
        """List the ranks that are silent, or were for so many seconds."""
        return self._server.silent(SILENT_BEATS * self._timeout.heartbeat_interval if seconds is None else seconds)

    def heard_nodes(self) -> set[str]:
        """List the nodes of which some rank is heard."""
        quiet = self.ranks()
        return {peer.host for peer in self._peers() if not peer.lost and peer not in quiet}

    def nodes(self, dead: Collection[str]) -> set[str]:
        """List the nodes of which no rank is heard any more, or, as those in `dead`, ever was.

        A rank that was killed is no evidence for its node, and neither is one that has not said hello yet: it may
        still import libraries.
        """
        quiet = self.ranks()
        return {*dead, *(peer.host for peer in self._peers() if peer.silent or peer in quiet)} - self.heard_nodes()

    def _peers(self) -> list[Peer]:
        return [peer for role in self._roles for peer in self._server.peers(role)]


def conductor_stood_still(absence_s: Callable[[float], float], timeout: Timeout) -> str:
    """Say that ranks ended because the conductor was stopped; empty: it was not, or not for longer than they wait.

    `absence_s(n)`: seconds for which it was stopped, if that ended within the last n seconds; else 0.
    """
    seconds = absence_s(timeout.heartbeat)
    if seconds < timeout.heartbeat - timeout.heartbeat_interval:
        return ""
    return (
        f"the conductor stood still for {seconds:.0f} s (stopped by a signal, or its machine was suspended), and the "
        f"ranks, which wait for {timeout.heartbeat:g} s (timeout.heartbeat), left: all are gone, not one role"
    )

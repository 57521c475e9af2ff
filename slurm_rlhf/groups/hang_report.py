"""Collects what is known of every rank and node while nothing moves, and writes it into a directory.

Everything has a deadline, and nothing waits for a rank that hangs: a rank that does not answer is examined through its
log and from outside.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.groups.hang_rules import HangVerdict, Sighting, rank_state
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.nodes.node_look import NodeView
from slurm_rlhf.observe.log_tail import read_end
from slurm_rlhf.observe.stacks import ThreadStack, last_late_dump, late_s, own_stacks, read_stacks, written
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import RankCalls, StacksAnswer
from slurm_rlhf.wire.handles import RoleHandle, failed
from slurm_rlhf.wire.messages import Flight, Peer, Said
from slurm_rlhf.workers.pool import stacks_of_workers

_SLACK_S = 5.0  # most seconds between a missing heartbeat and the time of the log


@dataclass(slots=True)
class Findings:
    """Holds what was found out about a hang."""

    ranks: list[Sighting]
    conductor: list[ThreadStack]
    said: list[Said]
    loads: dict[str, str] = field(default_factory=dict)  # node -> load
    notes: list[str] = field(default_factory=list)  # steps that failed, with the reason
    when: float = field(default_factory=time.time)


def ask_ranks(supervisor: Supervisor, directory: RunDirectory, timeout: Timeout) -> Findings:
    """Ask every rank for its stacks, and read the log of those that do not answer.

    Takes STACKS_S at most, and before it the time of `stacks_of_workers`.
    """
    server = supervisor.server
    flights: dict[Peer, Flight] = {}
    for flight in server.flights():
        flights.setdefault(flight.peer, flight)
    peers = [(handle, peer) for role, handle in supervisor.roles.items() for peer in server.peers(role)]
    asked = [(peer, _ask(handle, peer)) for handle, peer in peers]
    hang = Findings([], [*own_stacks(), *stacks_of_workers()], server.said())
    _wait(supervisor, asked, late_s(timeout.heartbeat) + 2 * timeout.heartbeat_interval)
    for peer, answer in asked:
        seen = Sighting(peer.role, peer.rank, peer.host, peer.pid, silent_s=server.quiet(peer))
        if peer in flights:
            seen = replace(seen, call=flights[peer].method, call_s=flights[peer].seconds)
        if answer.done() and answer.exception() is None:
            found = answer.result()
            hang.loads[peer.host] = found.node
            seen = replace(seen, threads=tuple(read_stacks(found.threads)), source="itself")
        elif threads := _late(directory.role_log(peer.role, peer.host, peer.rank), seen.silent_s):
            seen = replace(seen, threads=tuple(threads), source="lock")
        hang.ranks.append(seen)
    return hang


def _ask(handle: RoleHandle[Any], peer: Peer) -> Future[StacksAnswer]:
    try:
        return handle.ask(peer.rank, RankCalls.stacks)
    except SlurmRlhfError as error:
        return failed(error)


def _wait(supervisor: Supervisor, asked: Sequence[tuple[Peer, Future[StacksAnswer]]], quiet_s: float) -> None:
    """Wait for the answers; not of ranks that have been silent for so long that their log has their stacks."""
    end = time.monotonic() + timeouts.STACKS_S
    while time.monotonic() < end:
        left = [answer for peer, answer in asked if not answer.done() and supervisor.server.quiet(peer) < quiet_s]
        if not left:
            return
        wait(left, 0.1)


def _late(path: Path, silent_s: float) -> list[ThreadStack]:
    """Read the stacks that a rank has written since it fell silent; they are what its log ends with."""
    try:
        if path.stat().st_mtime < time.time() - silent_s - _SLACK_S:
            return []
        return read_stacks(last_late_dump(read_end(path, 0)))
    except OSError:
        return []


def look_from_outside(hang: Findings, supervisor: Supervisor) -> None:
    """Let the nodes look at the processes, and add what they see. Takes little more than LOOK_S."""
    pids: dict[str, list[int]] = defaultdict(list)
    for seen in hang.ranks:
        pids[seen.node].append(seen.pid)
    views: list[NodeView] = []
    try:
        views = supervisor.look(pids, timeouts.LOOK_S)
    except (OSError, SlurmRlhfError) as error:
        hang.notes.append(f"the nodes could not be looked at: {error}")
    for node in pids.keys() - {view.node for view in views}:
        hang.notes.append(
            f"{node} was not looked at from outside: nothing came back from it within {timeouts.LOOK_S:g} s"
        )
    states = {view.node: view.states for view in views}
    hang.loads.update({view.node: view.load for view in views})
    hang.ranks = [replace(seen, process=states.get(seen.node, {}).get(seen.pid, "")) for seen in hang.ranks]


def write_findings(hang: Findings, verdict: HangVerdict, paragraph: str, directory: Path) -> None:
    """Write report.txt, stacks.txt, messages.txt and nodes.txt into `directory`, which exists."""
    rows = [_row(seen, verdict) for seen in hang.ranks]
    notes = "".join(f"note: {note}\n" for note in hang.notes)
    table = "\n".join(rows)
    (directory / "report.txt").write_text(f"{paragraph}\n\n{table}\n\n{notes}", encoding="utf-8")
    stacks = [f"# {_title(seen)}\n{written(seen.threads) or '(no stack)'}\n" for seen in hang.ranks]
    own = f"# conductor\n{written(hang.conductor)}\n"
    (directory / "stacks.txt").write_text("\n".join([*stacks, own]), encoding="utf-8")
    messages = [f"{_clock(each.when)} {each.peer.role} rank {each.peer.rank}: {each.what}" for each in hang.said]
    (directory / "messages.txt").write_text("\n".join(messages) + "\n", encoding="utf-8")
    loads = "".join(f"{node}: {load}\n" for node, load in sorted(hang.loads.items()))
    (directory / "nodes.txt").write_text(loads, encoding="utf-8")


def take_flights(logs: Path, since: float, directory: Path) -> None:
    """Copy the files that NCCL's flight recorder has written since."""
    for path in logs.glob("nccl_trace.*"):
        if path.stat().st_mtime >= since:
            shutil.copy(path, directory / path.name)


def _row(seen: Sighting, verdict: HangVerdict) -> str:
    place = rank_state(seen)
    mark = "->" if seen in verdict.behind else "  "
    call = f"{seen.call} for {seen.call_s:.0f} s" if seen.call else "no call"
    at = f"{place.at.function} ({place.at.file}:{place.at.line})" if place.at else "?"
    return f"{mark} {seen.name:<16} {seen.node:<16} {call:<28} {place.kind:<11} {at}"


_SOURCES = {
    "itself": "its own answer",
    "lock": "its log, while something held the interpreter's lock",
    "": "nowhere",
}


def _title(seen: Sighting) -> str:
    return f"{seen.name} on {seen.node} (pid {seen.pid}), from {_SOURCES[seen.source]}"


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when)) + f"{when % 1:.3f}"[1:]

"""Watch a run after a fault: when it notices, whom it names, whether it goes on, and what it leaves behind."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from waiting import scaled

from campaign import processes
from campaign.faults import BORNE, CONDUCTOR, HURTS, Fault
from campaign.session import POLL_S, Session
from campaign.verdicts import Observation, innocents, newest_failure, patterns
from slurm_rlhf.cluster.processes import CONDUCTOR_GONE
from slurm_rlhf.polling import wait_until

SPARE_S = scaled(120.0)
"""Beyond the limit of a fault: then the run counts as one that did not notice it."""
BORNE_STEPS = 2
"""A run that does so many steps after a fault goes on undisturbed."""
RECOVERED_STEPS = 3
RECOVERED_S = 5.0
"""So many steps and seconds after a run has noticed a fault it has recovered in place."""
LASTS_S = 8.0
"""How long what holds a run up stays after it was noticed: longer than `timeout.hang_grace` of the runs."""
HELD_S = 2.0
LEAVE_S = 5.0
"""For the processes of a run, from the conductor's end to theirs."""
ENDS = ("error", "hang", "stop", "restart")
"""Events by which a run says that something is wrong, whatever it is."""


def watch(
    session: Session,
    fault: Fault,
    seen: Observation,
    known_events: int,
    hit_at: float,
    undo: Callable[[], object] = lambda: None,
    release: Callable[[], object] = lambda: None,
) -> None:
    """Fill `seen` with what happens after a fault that struck at `hit_at` (time.monotonic()); returns when it is clear.

    `known_events`: how many events there were before it. `undo` takes the fault away; it is called when it was noticed
    and has had its time, so that it does not meet a run that has recovered, and once more at the end. `release` lets an
    export go on that is held for the fault.
    """
    limit = hit_at + fault.limit_s + SPARE_S
    steps_then, marks = 0, {log: log.stat().st_size for log in session.directory.logs.glob("*.log")}
    undone = released = False
    crashed = (fault.kind, fault.target) == ("crash", f"node of {CONDUCTOR}")
    stopped = fault.kind == "SIGSTOP" and fault.target == CONDUCTOR
    while True:
        session.look_around()
        over, now = session.over, time.monotonic() - hit_at
        if seen.detected_s is None and noticed(session, fault, seen, known_events, over):
            seen.detected_s, steps_then = now, session.steps
        if not released and (seen.detected_s is not None or now > held_s(fault)):
            released = True
            release()
        if seen.detected_s is not None and not undone and now > seen.detected_s + LASTS_S:
            undone = True
            undo()
        speechless = (stopped or crashed) and seen.detected_s is None
        if speechless and CONDUCTOR_GONE in written_since(session.directory.logs, marks):
            seen.detected_s, steps_then = now, session.steps
        if stopped and speechless and seen.detected_s is not None:
            wait_until(lambda: len(processes.writers(session.directory.root)) <= 1, LEAVE_S)
            os.kill(seen.pid, signal.SIGCONT)
        if over:
            seen.went_on, seen.exit_code = finished(session), session.process.poll()
            seen.ended_s = None if seen.went_on else now
            break
        if goes_on(session, fault, seen, now, steps_then):
            seen.went_on = True
            break
        if time.monotonic() > limit:
            seen.error = f"{now:.0f} s after the fault the run had neither ended nor gone on"
            break
        time.sleep(POLL_S)
    undo()
    output = session.process.output()[seen.printed :] if session.over else ""
    seen.traceback = "Traceback (most recent call last)" in output
    seen.stated += output + (written_since(session.directory.logs, marks) if stopped or crashed else "")
    seen.stated += "\n" + "\n".join(session.events(known_events)) + "\n"
    seen.stated = newest_failure(seen.stated)
    seen.innocents = innocents(fault, seen.stated)


def noticed(session: Session, fault: Fault, seen: Observation, known_events: int, over: bool) -> bool:
    """Tell whether the run gives a sign of the fault: its end, an error, a hang, a warning that names the culprit."""
    if over and not finished(session):
        return True
    names = re.compile("|".join(f"(?:{one})" for one in patterns(fault, seen))) if fault.says else None
    stated = session.events(known_events)
    return any(text.partition(":")[0] in ENDS or (names and names.search(text)) for text in stated)


def finished(session: Session) -> bool:
    """Tell whether the run has done all its steps, and exported the model."""
    return session.process.poll() == 0 and (session.directory.final / "config.json").exists()


def held_s(fault: Fault) -> float:
    """Return how long an export is held for a fault: until a process is missed, or else until the fault had its time.

    What breaks the writing itself is noticed only when that goes on.
    """
    return math.inf if fault.does == HURTS and fault.kind.startswith("SIG") else HELD_S


def goes_on(session: Session, fault: Fault, seen: Observation, now: float, steps_then: int) -> bool:
    """Tell whether the run is beyond the fault."""
    if fault.does == BORNE:
        return session.steps >= max(seen.hit_step, seen.checkpoint) + BORNE_STEPS  # some to compare are after both
    if seen.detected_s is None:
        return False
    return now > seen.detected_s + RECOVERED_S and session.steps >= steps_then + RECOVERED_STEPS


def look_at_rest(session: Session, seen: Observation) -> None:
    """Note what an ended session has left: processes, files in /dev/shm, locks; then end the processes."""
    wait_until(lambda: not processes.still_there(session.members), LEAVE_S, 0.05)
    left = processes.still_there(session.members)
    left += [one for ones in processes.writers(session.directory.root).values() for one in ones if one not in left]
    seen.orphans = [f"process {one.pid} {processes.command_line(one)}" for one in left]
    seen.shared_memory = [name for name in sorted(session.shared_memory) if Path(name).exists()]
    if session.directory.root.is_dir():
        seen.locks = [f"lock {path}" for path in processes.held_locks(session.directory.root)]
    session.kill()


def written_since(logs: Path, marks: dict[Path, int]) -> str:
    """Return what was written into the logs of ranks since."""
    found = []
    for path in logs.glob("*.log"):
        with path.open("rb") as file:
            file.seek(marks.get(path, 0))
            found.append(file.read().decode(errors="replace"))
    return "\n".join(found)

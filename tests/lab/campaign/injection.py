"""Do to a run what a fault says."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from holds import LOCK, Holds
from intruders import attack

from campaign import files, processes
from campaign.faults import CONDUCTOR, Fault
from campaign.session import Session
from slurm_rlhf.errors import RunError
from slurm_rlhf.polling import wait_until

PAUSE_S = 3.0
BETWEEN_S = 0.5
"""From the first death to the second."""
LITTLE = 16 << 10
"""Bytes that a process may write to a file under a limit."""
CLOCK = {"+1 h": 3600.0, "-1 h": -3600.0, "+10 years": 315_360_000.0}
REWARD = {
    "hang": "reward-hang",
    "exception": "reward-raise",
    "too few rewards": "reward-few",
    "sys.exit": "reward-exit",
}
ACTOR = {"collective not entered": "python", "interpreter's lock held": LOCK, "exception": "actor-raise"}
REWARD_FUNCTION = "reward function"
SETTLED = (*REWARD, *ACTOR)
"""Kinds that strike when the run has done some steps: the watchdog has to have learned what is usual."""


def nothing() -> None: ...


@dataclass(slots=True)
class Hit:
    """Says what was done, and how to take it away again.

    `undo` is called once the fault was noticed and has had its time, and again when that is clear; `heal` at the end.
    """

    pid: int = 0  # the process that was hit
    undo: Callable[[], object] = nothing
    heal: Callable[[], object] = nothing
    at: float = field(default_factory=time.monotonic)
    events: int = 0  # the run had reported so many before
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Holds what faults are done with."""

    session: Session
    holds: Holds
    seed: int
    found: dict[str, int] = field(default_factory=dict)  # target -> process

    def find(self, fault: Fault) -> None:
        """Look the processes up before the phase comes: it may be over sooner than that."""
        for target in fault.target.split(", "):
            if " rank " in target or target.startswith("torchrun of "):
                self.found[target] = victim(self.session, target)

    def victim(self, target: str) -> int:
        """Return the process that a target means. Raises RunError where it is not there."""
        return self.found.get(target) or victim(self.session, target)


def inject(fault: Fault, place: Place) -> Hit:
    """Do it. Raises RunError when its target is not there, OSError."""
    return INJECT[function_of(fault)](fault, place)


def function_of(fault: Fault) -> str:
    """Return the name in `INJECT` of what does a fault."""
    if fault.target == REWARD_FUNCTION or fault.kind in ACTOR:
        return "switch"
    return next(name for name in INJECT if fault.kind.startswith(name) or fault.kind.endswith(name))


def _signal(fault: Fault, place: Place) -> Hit:
    pid = place.victim(fault.target)
    os.kill(pid, getattr(signal, fault.kind))
    return Hit(pid)


def _killed_twice(fault: Fault, place: Place) -> Hit:
    first, second = (place.victim(target) for target in fault.target.split(", "))
    os.kill(first, signal.SIGKILL)
    time.sleep(BETWEEN_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(second, signal.SIGKILL)
    return Hit(first)


def _paused(fault: Fault, place: Place) -> Hit:
    pid = place.victim(fault.target)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)
    return Hit(pid)


def _hold(place: Place, name: str, text: str = "") -> Hit:
    place.holds.hold(name, text)
    return Hit(undo=lambda: place.holds.let_go(name))


def _damaged(fault: Fault, place: Place) -> Hit:
    """Kill the run, and damage what it goes on from."""
    place.session.kill()
    files.damage(place.session.directory.checkpoints, fault.kind.removeprefix("newest checkpoint "))
    return Hit(place.session.process.pid)


def _switched(fault: Fault, place: Place) -> Hit:
    return _hold(place, (REWARD if fault.target == REWARD_FUNCTION else ACTOR)[fault.kind])


def _set_clock(fault: Fault, place: Place) -> Hit:
    return _hold(place, "clock", str(CLOCK[fault.kind.removeprefix("clock jump ")]))


def _attacked(fault: Fault, place: Place) -> Hit:
    pid = place.session.process.pid
    attack(fault.kind.removesuffix(" messages"), endpoint(pid), place.session.directory.keys, place.seed)
    return Hit(pid)


def _limited(fault: Fault, place: Place) -> Hit:
    pid = place.victim(fault.target)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LITTLE, LITTLE))  # as a quota does
    return Hit(pid)


def _filled(fault: Fault, place: Place) -> Hit:
    disk = place.session.directory.root.parent
    files.fill(disk)
    return Hit(undo=lambda: (disk / files.FILLER).unlink(missing_ok=True))


def _deleted(fault: Fault, place: Place) -> Hit:
    files.remove_all(place.session.directory.root)
    return Hit()


def _renamed(fault: Fault, place: Place) -> Hit:
    root = place.session.directory.root
    aside = root.with_name(f"{root.name}.aside")
    root.rename(aside)
    return Hit(undo=lambda: aside.exists() and not root.exists() and aside.rename(root))


INJECT: dict[str, Callable[[Fault, Place], Hit]] = {
    "SIGKILL, one after the other": _killed_twice,
    "SIG": _signal,
    "pause": _paused,
    "clock jump": _set_clock,
    "messages": _attacked,
    "newest checkpoint": _damaged,
    "file size limit": _limited,
    "full disk": _filled,
    "deleted": _deleted,
    "renamed": _renamed,
    "switch": _switched,
}
"""Beginning or end of a kind -> what does it."""


def victim(session: Session, target: str) -> int:
    """Return the process that a target means. Raises RunError where it does not come within some seconds."""
    if target == CONDUCTOR:
        return session.process.pid
    found: list[psutil.Process | None] = [None]

    def there() -> bool:
        root = session.directory.root
        if target.startswith("torchrun of "):
            found[0] = processes.torchrun(root, target.removeprefix("torchrun of "))
        else:
            role, _, number = target.partition(" rank ")
            found[0] = processes.rank(root, role, int(number))
        return found[0] is not None

    if not wait_until(there, 60.0, 0.02):
        raise RunError(f"{target} is not there")
    assert found[0] is not None
    return found[0].pid


def endpoint(pid: int) -> str:
    """Return where a process of this machine listens. Raises RunError when that is nowhere."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid).net_connections("tcp4"):
            if each.status == psutil.CONN_LISTEN:
                return f"tcp://127.0.0.1:{each.laddr.port}"
    raise RunError(f"process {pid} listens nowhere")

"""One start of a run, watched from outside: its phases, its steps, the signs that it gives of a fault, its end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
from waiting import HANG_S

from campaign import processes
from campaign.faults import START
from slurm_rlhf.checkpoint.resume import latest
from slurm_rlhf.errors import RunError
from slurm_rlhf.observe.run_log import CHECKPOINT, RESTART, RESUME, read_events, read_rows
from slurm_rlhf.observe.run_log import START as BEGUN
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory

QUICK_S = 0.002
"""Between two looks at the phase: a phase of the tiny run lasts for tens of milliseconds."""
POLL_S = 0.05
CALM_S = 1800.0
"""The most that a run takes which is left alone."""
TRIES = 20
"""A phase is met so often: a short one may be over before a fault strikes."""
ORDERLY = (CHECKPOINT, BEGUN, RESUME)
"""Events that are no sign of a fault."""


@dataclass(frozen=True, slots=True)
class PhaseNow:
    """Says in which phase a run is after `step` steps, since the Unix time `since`; empty: between two phases."""

    phase: str
    step: int
    since: float


def read_phase(run_dir: Path) -> PhaseNow | None:
    """Read what the plugin of the run's conductor notes; None if there is nothing that can be read."""
    try:
        return PhaseNow(**json.loads((run_dir / ".control" / "phase").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest whole checkpoint of a run; 0: there is none."""
    whole = latest(run_dir / "checkpoints")
    return int(whole.name.partition("_")[2].partition(".")[0]) if whole else 0


class Started(Protocol):
    """A command that was started: `subprocess.Popen`, with what it printed."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""

    def output(self) -> str:
        """Return what it printed so far."""

    def kill(self) -> None:
        """End it by force."""


Start = Callable[[Sequence[str]], Started]
"""Start `slurm-rlhf` with these words, in a session of its own."""


class Session:
    """A start of the run in `run_dir`."""

    def __init__(self, start: Start, config: Path, run_dir: Path, *overrides: str) -> None:
        self.directory = RunDirectory(run_dir)
        self._known = len(read_events(self.directory.events))
        self._old = read_phase(self.directory.root)
        self.process = start(["train", str(config), f"--run_dir={run_dir}", *overrides])
        self.members: set[psutil.Process] = set()
        """Every process that was seen to belong to it."""
        self.shared_memory: set[str] = set()
        self._looked = 0.0

    @property
    def over(self) -> bool:
        """Tell whether the conductor has ended."""
        return self.process.poll() is not None

    @property
    def steps(self) -> int:
        """Return how many steps are done."""
        rows = read_rows(self.directory.metrics)
        return int(rows[-1]["step"]) if rows else 0

    @property
    def checkpoint(self) -> int:
        """Return the step of the newest whole checkpoint; 0: there is none."""
        return newest_step(self.directory.root)

    @property
    def began_at(self) -> int | None:
        """Return the step from which it went on; None while it has not said so."""
        return next(iter(self._beginnings()), None)

    @property
    def goes_from(self) -> int | None:
        """Return the step beyond which it is new: where it went on last, or had come when trainers were restarted."""
        return next(reversed(self._beginnings()), None)

    def _beginnings(self) -> list[int]:
        new = read_events(self.directory.events)[self._known :]
        return [event.step for event in new if event.event in (BEGUN, RESUME, RESTART)]

    def phase(self) -> PhaseNow | None:
        """Return the phase that this start is in."""
        now = read_phase(self.directory.root)
        return None if now == self._old else now

    def events(self, since: int) -> list[str]:
        """Return the events from number `since` on that are no sign of an orderly run."""
        found = read_events(self.directory.events)[since:]
        return [f"{event.event}: {event.text}" for event in found if event.event not in ORDERLY]

    def own_events(self) -> list[str]:
        """Return the events of this start that are no sign of an orderly run."""
        return self.events(self._known)

    def count_events(self) -> int:
        return len(read_events(self.directory.events))

    def look_around(self) -> None:
        """Note which processes and which shared memory belong to it; twice a second at most."""
        if time.monotonic() - self._looked > 0.5:
            self._looked = time.monotonic()
            self.members |= processes.tree(self.process.pid)
            self.shared_memory |= processes.shared_memory(processes.still_there(self.members))

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` steps are done. Raises RunError when it ends before, or takes longer."""
        self._wait(lambda: self.steps >= step, f"step {step}", POLL_S)

    def wait_for_phase(self, names: Sequence[str], step: int, poll_s: float = QUICK_S) -> None:
        """Wait until it is in one of the phases, after `step` steps or more. Raises RunError as `wait_for_step`."""

        def there() -> bool:
            now = self.phase()
            return now is not None and now.phase in names and (now.step >= step or now.phase == START)

        self._wait(there, f"phase {' or '.join(names)} after step {step}", poll_s)

    def start_s(self) -> float:
        """Wait until the run has started, and return how long that took. Raises RunError as `wait_for_step`."""
        self.wait_for_phase((START,), 0)
        begun = time.monotonic()
        self._wait(lambda: self.over or self.phase_now().phase != START, "its first step", POLL_S)
        return time.monotonic() - begun

    def meet_phase(self, names: Sequence[str], delay_s: float = 0.0) -> PhaseNow:
        """Wait until it is in one of the phases, and `delay_s` more; again, with half the delay, where it left by then.

        Returns the phase of now, which after the last try may be another one. Raises RunError as `wait_for_step`.
        """
        for _ in range(TRIES):
            self.wait_for_phase(names, self.steps)
            time.sleep(delay_s)
            now, delay_s = self.phase_now(), delay_s / 2
            if now.phase in names:
                break
        return now

    def phase_now(self) -> PhaseNow:
        """Return the phase that this start is in, which may be none."""
        return self.phase() or PhaseNow("", 0, 0.0)

    def _wait(self, ready: Callable[[], bool], what: str, poll_s: float) -> None:
        end = time.monotonic() + HANG_S
        while not ready():
            if self.over:
                raise RunError(f"the run ended before {what}: {self.process.output()[-2000:]}")
            if time.monotonic() > end:
                raise RunError(f"no {what} within {HANG_S:g} s")
            if poll_s > QUICK_S:  # a look around takes longer than a short phase
                self.look_around()
            time.sleep(poll_s)

    def stop(self) -> None:
        """Let it save and leave, so that nothing of it counts as a fault; by force if it does not."""
        (self.directory.root / "stop").touch()
        if not wait_until(lambda: self.over, HANG_S, POLL_S, POLL_S):
            self.kill()

    def kill(self) -> None:
        """End every process of it by its id."""
        self.look_around()
        self.members |= processes.tree(self.process.pid)
        for one in processes.still_there(self.members):
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not self.over:
            self.process.kill()
        wait_until(lambda: self.over, 60.0, POLL_S, POLL_S)

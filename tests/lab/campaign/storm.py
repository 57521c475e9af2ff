"""A long run in bad weather: again and again a fault drawn from a seed strikes it, until all steps are done."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holds import Holds
from sums_task import PACE
from waiting import HANG_S

from campaign.faults import ANY, CONDUCTOR, RANKS, START, Fault, killed
from campaign.injection import victim
from campaign.session import CALM_S, POLL_S, Session, Start
from campaign.verdicts import Observation, Row, judge, unequal
from campaign.watch import look_at_rest
from campaign.workload import write_workload
from slurm_rlhf.errors import RunError
from slurm_rlhf.observe.events import RunEvent, read_events
from slurm_rlhf.observe.jsonl import read_rows
from slurm_rlhf.polling import wait_until

TARGETS = (*RANKS, CONDUCTOR)
NOTICED_S = 5.0
"""In which a run that goes on in place has begun to go back to its checkpoint."""


@dataclass(frozen=True, slots=True)
class Blow:
    """Says what struck a run, at the Unix time `at`."""

    name: str
    at: float
    says: str = ""  # a regular expression that names the culprit; empty: a run goes on as if nothing were


Strike = Callable[[Session, random.Random], Blow]
"""Draw a fault, and do it."""


def kill_one(session: Session, dice: random.Random) -> Blow:
    """Kill a process of a run on this machine."""
    target = dice.choice(TARGETS)
    pid = victim(session, target)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return Blow(target, at, killed(target, START).says)


def noticed(blows: Sequence[Blow], events: Sequence[RunEvent], ends: Sequence[float]) -> list[float | None]:
    """Return for each blow that hurts how long after it the run named it in an event, or ended; None: never.

    `ends`: the Unix times at which starts of the run broke off. A sign is one of the last blow that it fits: what
    strikes a role that is just being ended is never named.
    """
    hurting = [blow for blow in blows if blow.says]
    found: list[float | None] = [None] * len(hurting)
    for at, text in sorted([*((event.at, event.text) for event in events), *((end, "") for end in ends)]):
        fits = [i for i, blow in enumerate(hurting) if blow.at <= at and (not text or re.search(blow.says, text))]
        if fits and found[fits[-1]] is None:
            found[fits[-1]] = at - hurting[fits[-1]].at
    return found


def words(found: Sequence[float | None]) -> str:
    """Say how soon the faults were noticed."""
    times = [seconds for seconds in found if seconds is not None]
    if not times:
        return f"none of {len(found)} faults was noticed"
    most = f"median {statistics.median(times):.1f} s, at most {max(times):.1f} s"
    return f"{len(times)} of {len(found)} faults that hurt were noticed, {most}"


@dataclass(slots=True)
class Storm:
    """Strikes `every_s` seconds after the run has begun to step, and again after each recovery.

    `rest` notes what an ended start has left. `pace_s`: seconds that each reward takes longer, so that more faults
    meet the same steps. `options`: of the run.
    """

    out: Path
    start: Start
    seed: int
    steps: int
    every_s: float
    strike: Strike = kill_one
    rest: Callable[[Session, Observation], None] = look_at_rest
    pace_s: float = 0.0
    options: Sequence[str] = ()
    struck: list[Blow] = field(default_factory=list)  # in their order
    ends: list[float] = field(default_factory=list, init=False)  # Unix times at which starts of the run broke off

    def run(self) -> Row:
        """Return the row of the whole run: the longest time to a fault's notice, and in words the median.

        Raises RunError when the calm one does not finish.
        """
        dice, config = random.Random(self.seed), write_workload(self.out / "work")
        calm = self._session(config, "calm")
        try:
            if not wait_until(lambda: calm.over, CALM_S, POLL_S) or calm.process.poll() != 0:
                raise RunError(f"the calm run did not finish: {calm.process.output()[-2000:]}")
        finally:
            calm.kill()
        Holds(config).hold(PACE, str(self.pace_s))
        seen = Observation(hit_phase="all phases", resumed=True, exit_code=1, ended_s=0.0)
        fault = Fault(f"a fault every {self.every_s:g} s", f"{self.steps} steps", ANY, says="died|cut off|is lost")
        try:
            while not self._lives_through(config, dice, seen):
                continue
        except RunError as error:
            seen.error = str(error)
        rows, expected = (read_rows(self.out / name / "metrics.jsonl") for name in ("run", "calm"))
        seen.compared, seen.unequal = unequal(rows, expected)
        if [row["step"] for row in rows] != list(range(1, self.steps + 1)):
            seen.error = seen.error or f"metrics.jsonl has {len(rows)} steps of {self.steps}"
        found = noticed(self.struck, read_events(self.out / "run" / "events.jsonl"), self.ends)
        seen.detected_s = max((seconds for seconds in found if seconds is not None), default=None)
        row = judge(fault, seen)
        return replace(row, said=f"{words(found)}; {row.said}")

    def _session(self, config: Path, name: str) -> Session:
        return Session(self.start, config, self.out / name, f"--train.max_steps={self.steps}", *self.options)

    def _lives_through(self, config: Path, dice: random.Random, seen: Observation) -> bool:
        """Start the run, and strike until it ends; True when all steps are done."""
        session = self._session(config, "run")
        try:
            while self._steps(session) and self._quiet(session):
                done = session.steps
                self.struck.append(self.strike(session, dice))
                print(f"after step {done}: {self.struck[-1].name}", flush=True)
                wait_until(lambda: session.over, NOTICED_S, POLL_S)
            if session.process.poll() != 0:
                self.ends.append(time.time())
            seen.told += session.process.output() + "\n".join(session.own_events())
            self.rest(session, rest := Observation())
            seen.orphans += rest.orphans
            seen.shared_memory += rest.shared_memory
            seen.locks += rest.locks
            return session.process.poll() == 0
        finally:
            session.kill()

    def _steps(self, session: Session) -> bool:
        """Wait until the run does a step; False: it is over."""

        def moves() -> bool:
            session.look_around()
            begun = session.goes_from
            return session.over or (begun is not None and session.steps > begun)

        if not wait_until(moves, HANG_S, POLL_S):
            raise RunError(f"no step within {HANG_S:g} s")
        return not session.over

    def _quiet(self, session: Session) -> bool:
        """Let it be for `every_s` seconds; False: it is over."""
        return not wait_until(lambda: session.over, self.every_s, POLL_S)

"""A long run in bad weather: again and again a fault drawn from a seed strikes it, until all steps are done."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.campaign.faults import ANY, CONDUCTOR, RANKS, Fault
from slurm_rlhf.campaign.holds import Holds
from slurm_rlhf.campaign.injection import victim
from slurm_rlhf.campaign.session import FIRST_STEP_S, POLL_S, Session, Start
from slurm_rlhf.campaign.verdicts import Observation, Row, judge, unequal
from slurm_rlhf.campaign.watch import look_at_rest
from slurm_rlhf.campaign.workload import PACE, write_workload
from slurm_rlhf.errors import RunError
from slurm_rlhf.observe.jsonl import read_rows
from slurm_rlhf.polling import wait_until

TARGETS = (*RANKS, CONDUCTOR)
CALM_S = 1800.0
NOTICED_S = 5.0
"""In which a run that goes on in place has begun to go back to its checkpoint."""


Strike = Callable[[Session, random.Random], str]
"""Draw a fault, do it, and return its name."""


def kill_one(session: Session, dice: random.Random) -> str:
    """Kill a process of a run on this machine."""
    target = dice.choice(TARGETS)
    os.kill(victim(session, target), signal.SIGKILL)
    return target


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
    note: Callable[[str], None]
    strike: Strike = kill_one
    rest: Callable[[Session, Observation], None] = look_at_rest
    pace_s: float = 0.0
    options: Sequence[str] = ()
    struck: list[str] = field(default_factory=list)  # faults, in their order

    def run(self) -> Row:
        """Return the row of the whole run. Raises RunError when the calm one does not finish."""
        dice, config = random.Random(self.seed), write_workload(self.out / "work")
        calm = self._session(config, "calm")
        try:
            if not wait_until(lambda: calm.over, CALM_S, POLL_S) or calm.process.poll() != 0:
                raise RunError(f"the calm run did not finish: {calm.process.output()[-2000:]}")
        finally:
            calm.kill()
        Holds(config).hold(PACE, str(self.pace_s))
        seen = Observation(hit_phase="all phases", resumed=True, exit_code=1, ended_s=0.0, detected_s=0.0)
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
        return judge(fault, seen)

    def _session(self, config: Path, name: str) -> Session:
        return Session(self.start, config, self.out / name, f"--train.max_steps={self.steps}", *self.options)

    def _lives_through(self, config: Path, dice: random.Random, seen: Observation) -> bool:
        """Start the run, and strike until it ends; True when all steps are done."""
        session = self._session(config, "run")
        try:
            while self._steps(session) and self._quiet(session):
                done = session.steps
                self.struck.append(self.strike(session, dice))
                self.note(f"after step {done}: {self.struck[-1]}")
                wait_until(lambda: session.over, NOTICED_S, POLL_S)
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

        if not wait_until(moves, FIRST_STEP_S, POLL_S):
            raise RunError(f"no step within {FIRST_STEP_S:g} s")
        return not session.over

    def _quiet(self, session: Session) -> bool:
        """Let it be for `every_s` seconds; False: it is over."""
        return not wait_until(lambda: session.over, self.every_s, POLL_S)

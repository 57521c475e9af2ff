"""Lead a campaign: one start of the run recovers from the last fault and meets the next one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from holds import Holds
from small_disk import small_disk

from campaign import files
from campaign.draw import delay_s
from campaign.faults import ANY, EXPORT, PHASES, START, Fault
from campaign.injection import SETTLED, Hit, Place, inject
from campaign.session import CALM_S, POLL_S, PhaseNow, Session, Start, newest_step
from campaign.verdicts import Observation, Row, judge, unequal
from campaign.watch import finished, look_at_rest, watch
from campaign.workload import write_workload
from slurm_rlhf.errors import RunError, SlurmRlhfError
from slurm_rlhf.observe.run_log import read_rows
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory

EXPORT_STEPS = 6
"""Length of the runs whose export is disturbed; it is held until the fault was noticed, or had its time."""
LEARNED_STEPS = 4
"""Steps of a session before a fault that the watchdog finds: it learns three passes first."""
DELAY_S = 0.03
"""The most that a fault comes after the beginning of its phase: the phases of the tiny run are short."""
START_DELAY_S = 3.0
"""The same of a start, or half of what the shortest start has taken here."""
END_S = 60.0


@dataclass(slots=True)
class Case:
    """A fault that struck, and what was seen of it so far."""

    fault: Fault
    seen: Observation
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics of the steps after its last checkpoint


class Site(Protocol):
    """Does faults to the runs of a campaign, which `start` starts, and looks at what they leave."""

    start: Start

    def prepare(self, session: Session, fault: Fault, holds: Holds) -> None:
        """Look up before its phase comes what a fault hits."""

    def strike(self, session: Session, fault: Fault, holds: Holds, seen: Observation) -> Hit:
        """Do it. Raises RunError if its target is not there, OSError."""

    def look_after(self, session: Session, fault: Fault, seen: Observation, hit: Hit) -> None:
        """Note what a fault has left, once it is clear what it did, and before it is healed."""

    def look_at_rest(self, session: Session, seen: Observation) -> None:
        """Note what an ended session has left."""

    def moves(self, fault: Fault) -> bool:
        """Tell whether ranks are elsewhere after a fault, so that the next one is to meet a new session."""


class ThisMachine:
    """Implements `Site`: runs on this machine."""

    def __init__(self, start: Start, seed: int) -> None:
        self.start = start
        self._seed = seed
        self._found: dict[str, int] = {}

    def prepare(self, session: Session, fault: Fault, holds: Holds) -> None:
        place = Place(session, holds, self._seed)
        place.find(fault)
        self._found = place.found

    def strike(self, session: Session, fault: Fault, holds: Holds, seen: Observation) -> Hit:
        at, events = time.monotonic(), session.count_events()
        hit = inject(fault, Place(session, holds, self._seed, self._found))
        hit.at, hit.events, hit.heal = at, events, hit.undo
        return hit

    def look_after(self, session: Session, fault: Fault, seen: Observation, hit: Hit) -> None:
        if seen.exit_code is not None and seen.exit_code < 0:  # a conductor that was killed leaves no word
            asked = self.start(["status", str(session.directory.root)])
            wait_until(lambda: asked.poll() is not None, END_S, 0.05)
            seen.stated += asked.output()
        if session.over:
            look_at_rest(session, seen)

    def look_at_rest(self, session: Session, seen: Observation) -> None:
        look_at_rest(session, seen)

    def moves(self, fault: Fault) -> bool:
        return False


class Leader:
    """Runs faults one after the other below a directory, which is its own."""

    def __init__(
        self, out: Path, site: Site, seed: int, calm_steps: int | None = None, options: Sequence[str] = ()
    ) -> None:
        """`calm_steps`: length of the run that is left alone; None: enough for all faults. `options`: of each run."""
        self._calm_steps = calm_steps
        self._out = out
        self._site = site
        self._seed = seed
        self._options = options
        self._config = write_workload(out / "work")
        self._holds = Holds(self._config)
        self._calm: list[dict[str, Any]] = []  # metrics of the run that all others are compared with
        self._model = b""  # the model that an undisturbed run of `EXPORT_STEPS` exports
        self._session: Session | None = None
        self._chain = 0
        self._start_s = 2 * START_DELAY_S  # the shortest start so far
        self._waiting: list[Case] = []  # cases that need a session which shows whether the same command goes on
        self._borne: list[Case] = []  # cases that are judged at the end of their session

    def run(self, faults: Sequence[Fault]) -> Iterator[Row]:
        """Yield a row for each fault, some later than others; the last ones at the end."""
        calm = self._left_alone("calm", self._calm_steps or max(40, 3 * len(faults)))
        self._calm = read_rows(calm.metrics)
        try:
            # Faults with runs of their own come last: meanwhile the other run would go on and on.
            for fault in sorted(faults, key=_stands_apart):
                if _stands_apart(fault):
                    yield from self._last()
                began = time.monotonic()
                case = Case(fault, Observation())
                try:
                    yield from self._apart(case) if _stands_apart(fault) else self._chained(case)
                except (SlurmRlhfError, OSError) as error:
                    case.seen.error = f"{type(error).__name__}: {error}"
                    if not _stands_apart(fault):
                        yield from self._give_up()
                        yield from self._resolved(resumed=False)
                    yield judge(fault, case.seen)
                print(f"{fault.name}: {time.monotonic() - began:.0f} s", flush=True)
            yield from self._last()
        finally:
            if self._session is not None:
                self._session.kill()

    def _left_alone(self, name: str, steps: int) -> RunDirectory:
        """Let a run do so many steps. Raises RunError where it does not."""
        begun = time.monotonic()
        session = self._start(self._out / name, f"--train.max_steps={steps}")
        try:
            self._start_s = min(self._start_s, session.start_s())
            if not wait_until(lambda: session.over, CALM_S, 0.1):
                raise RunError(f"the calm run was not over within {CALM_S:g} s")
        finally:
            session.kill()
        if session.steps != steps or not finished(session):
            raise RunError(f"the calm run ended after {session.steps} steps: {session.process.output()[-2000:]}")
        print(f"calm run: {steps} steps in {time.monotonic() - begun:.0f} s", flush=True)
        return session.directory

    def _start(self, run_dir: Path, *options: str) -> Session:
        return Session(self._site.start, self._config, run_dir, *self._options, *options)

    # --- faults of one run, which goes on and on -------------------------------------------------------------------

    def _chained(self, case: Case) -> Iterator[Row]:
        fault, seen = case.fault, case.seen
        if self._session is not None and (fault.phase == START or self._used_up(self._session.steps)):
            yield from self._leave()
        session = self._session or self._open()
        if fault.phase != START:
            yield from self._until_it_steps(session, fault)
        self._strike(session, case)
        if seen.ended_s is not None:
            yield from self._settled()
            self._session = None
            self._waiting.append(case)
            return
        case.rows = _rows(session, seen.checkpoint)
        self._borne.append(case)
        if seen.error:
            yield from self._give_up()
        elif self._site.moves(fault):
            yield from self._leave()

    def _open(self) -> Session:
        """Start the run, in a new directory where the calm one has no steps left to compare."""
        if not self._chain or (not self._waiting and self._used_up(newest_step(self._run_dir))):
            self._chain += 1
        self._session = self._start(self._run_dir)
        return self._session

    def _used_up(self, step: int) -> bool:
        """Tell whether the calm run has hardly a step beyond `step` to compare with."""
        return step > len(self._calm) - min(15, len(self._calm) // 2)

    @property
    def _run_dir(self) -> Path:
        return self._out / f"run-{self._chain}"

    def _until_it_steps(self, session: Session, fault: Fault) -> Iterator[Row]:
        """Wait for the steps before the fault; they show that the same command went on after the ones before."""
        session.wait_for_phase(("rollout", ""), 0, POLL_S)
        begun = session.goes_from or 0
        ahead = LEARNED_STEPS if fault.kind in SETTLED else 1
        if fault.kind.startswith("newest checkpoint"):
            ahead = 5  # two checkpoints
        session.wait_for_step(max(begun + ahead, session.steps if self._waiting else 0))
        yield from self._resolved(resumed=True, session=session)

    def _strike(self, session: Session, case: Case) -> None:
        """Wait for the phase, do it, watch."""
        fault, seen = case.fault, case.seen
        known, seen.printed = session.count_events(), len(session.process.output())
        now = self._meet(session, fault)
        hit = self._site.strike(session, fault, self._holds, seen)
        seen.hit_phase, seen.hit_step, seen.pid, seen.nodes = now.phase, now.step, hit.pid, hit.nodes
        try:
            seen.checkpoint = session.checkpoint
            seen.stated = "\n".join([*session.events(known), ""])
            watch(session, fault, seen, hit.events, hit.at, hit.undo, partial(self._holds.let_go, EXPORT))
            self._site.look_after(session, fault, seen, hit)
        finally:
            hit.heal()
            self._holds.let_go(EXPORT)

    def _meet(self, session: Session, fault: Fault) -> PhaseNow:
        """Wait for the phase of the fault, and a drawn moment more; a start that was shorter is over then."""
        longest = self._start_s / 2 if fault.phase == START else DELAY_S
        delay = delay_s(fault, self._seed, longest)
        if fault.phase == START:
            session.wait_for_phase(PHASES[START], 0)
        self._site.prepare(session, fault, self._holds)
        if fault.phase not in (START, ANY):
            return session.meet_phase(PHASES[fault.phase], delay)
        time.sleep(delay)
        return session.phase_now()

    def _leave(self) -> Iterator[Row]:
        """End a session in order, and look what it has left: the last fault that it has borne answers for that."""
        if self._session is None:
            return
        self._session.stop()
        if self._borne:
            self._site.look_at_rest(self._session, self._borne[-1].seen)
        self._session = None
        yield from self._settled()

    def _settled(self) -> Iterator[Row]:
        """Yield the rows of the faults that a session has borne."""
        borne, self._borne = self._borne, []
        yield from map(self._row, borne)

    def _give_up(self) -> Iterator[Row]:
        """End a session by force, and go on in a new directory."""
        if self._session is not None:
            self._session.kill()
            self._session = None
            self._chain += 1
        yield from self._settled()

    def _resolved(self, resumed: bool, session: Session | None = None) -> Iterator[Row]:
        """Yield the rows of the faults that waited for the same command to go on."""
        waiting, self._waiting = self._waiting, []
        for case in waiting:
            case.seen.resumed = resumed
            if session is not None:
                case.seen.resumed_at = session.began_at or 0
                # A start names damaged checkpoints.
                case.seen.stated += "\n".join([*session.own_events(), session.process.output()])
                case.rows = _rows(session, min(case.seen.checkpoint, case.seen.resumed_at))
            yield self._row(case)

    def _row(self, case: Case) -> Row:
        case.seen.compared, case.seen.unequal = unequal(case.rows, self._calm)
        return judge(case.fault, case.seen)

    def _last(self) -> Iterator[Row]:
        """Let the last session go on once more."""
        if not self._waiting:
            yield from self._leave()
            return
        session = self._session or self._open()
        try:
            session.wait_for_phase(("rollout", ""), 0, POLL_S)
            session.wait_for_step((session.began_at or 0) + 2)
            yield from self._resolved(resumed=True, session=session)
        except RunError as error:
            print(error, flush=True)
            yield from self._resolved(resumed=False)
        yield from self._leave()

    # --- faults that a run of their own has ------------------------------------------------------------------------

    def _apart(self, case: Case) -> Iterator[Row]:
        fault = case.fault
        name = "".join(char if char.isalnum() else "-" for char in fault.name)
        with ExitStack() as stack:
            home = self._out / "apart" / name
            if fault.needs == "root":
                home = stack.enter_context(small_disk(home, str(files.DISK)))
            options = []
            if fault.phase == EXPORT:
                options.append(f"--train.max_steps={EXPORT_STEPS}")
                self._model = self._model or exported(self._left_alone("calm-export", EXPORT_STEPS))
                self._holds.hold(EXPORT)
            if fault.needs == "root":
                options.append("--ckpt.max_num=100")  # a disk that a run makes room on is not full
            session = self._start(home / "run", *options)
            try:
                session.wait_for_step(1 if fault.phase == EXPORT else 2)
                self._strike(session, case)
            finally:
                session.kill()
            if case.seen.ended_s is not None and fault.kind != "deleted":
                session = self._again(case, home / "run", options)
            case.rows = _rows(session, 0)
            if fault.phase == EXPORT and exported(session.directory) != self._model:
                case.seen.lost.append("the exported model is not that of a run which was left alone")
            yield self._row(case)

    def _again(self, case: Case, run_dir: Path, options: Sequence[str]) -> Session:
        """Start the same command again, and let it go on to its end, or for two steps."""
        session = self._start(run_dir, *options)
        try:
            wait_until(lambda: session.over or session.began_at is not None, END_S, 0.05)
            case.seen.resumed_at = session.began_at if session.began_at is not None else session.steps
            if case.fault.phase == EXPORT:
                wait_until(lambda: session.over, 2 * END_S, 0.05)
                case.seen.resumed = finished(session)
            else:
                session.wait_for_step(case.seen.resumed_at + 2)
                case.seen.resumed = True
        except RunError as error:
            case.seen.resumed = False
            case.seen.stated += str(error)
        finally:
            session.kill()
        return session


def _stands_apart(fault: Fault) -> bool:
    return fault.apart or fault.phase == EXPORT


def exported(directory: RunDirectory) -> bytes:
    """Return the weights that a run has exported; empty: it has not."""
    file = directory.final / "model.safetensors"
    return file.read_bytes() if file.exists() else b""


def _rows(session: Session, after: int) -> list[dict[str, Any]]:
    return [row for row in read_rows(session.directory.metrics) if row["step"] > after]

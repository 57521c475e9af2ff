"""Finds out that nothing moves, names the ranks that cause it, and ends the run as `train.on_hang` says.

A run moves while its ranks answer calls, calls of users' code end, and its phases change. How long nothing may move is
learned for each phase from the earlier steps. A wait that is longer is reported: `hang-<step>/` and one paragraph. If
nothing moves for `timeout.hang_grace` more the run ends; not before the deadline of users' code that it waits for.
Calls keep the deadlines of the table, which are the ceiling of every budget.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from slurm_rlhf.cluster.stop import Reason, Stop, StopRequested
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, RoleDied, RunError, RunHung
from slurm_rlhf.groups.hang_report import Findings, ask_ranks, look_from_outside, take_flights, write_findings
from slurm_rlhf.groups.hang_rules import HangVerdict, judge
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.observe.stacks import MAIN, LateStacks
from slurm_rlhf.observe.timing import Budget, WaitBudgets
from slurm_rlhf.polling import UNDER_WAY
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.io_thread import ListeningClock
from slurm_rlhf.wire.messages import Flight

log = logging.getLogger(__name__)

POLL_S = 0.25
CEILING = 0.9
"""Largest budget, as a share of a call's deadline: the stacks are taken before the call is given up."""
START = "start"
"""The phase before the first step."""
MOST_RESTARTS = 3
"""Most restarts for hangs of the same step: a step that always hangs would otherwise be restarted for ever."""
_REWARDING = (MAIN, "groups")
"""Names of the threads that call the user's reward function."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Describes a hang that was reported."""

    step: int
    phase: str
    verdict: HangVerdict
    where: Path
    attempt: int  # count of hangs of this step, 1 for the first

    def error(self) -> RunHung:
        return RunHung(
            f"step {self.step} hung in {_phase_words(self.phase)}: {self.verdict.words}. All of it is in {self.where}."
        )


@dataclass
class Watchdog:
    """Watches one run. The main thread calls `phase`, `ended` and `behind`; a thread of its own does the rest."""

    config: Config
    directory: RunDirectory
    supervisor: Supervisor
    stop: Stop
    note: Callable[[str], None]
    note_hang: Callable[[str], None]
    step: Callable[[], int]  # returns the number of the step that is under way

    def __post_init__(self) -> None:
        self._budgets = WaitBudgets(self.config.timeout.hang)
        self._phase = START
        self._clock = ListeningClock(timeouts.WATCHDOG_ROUND_S)  # stands still while this process is suspended
        self._moved = self._clock.now()
        self._moves = 0  # count of the moves of ranks and users' code at that time
        self._hang: Hang | None = None
        self._stuck_since: float | None = None  # time of the last move before the hang
        self._stuck_phase = ""  # phase of the hang; kept when an error ends the phase
        self._act_at = 0.0
        self._asked_to_stop = False
        self._silent: set[str] = set()  # ranks that were not heard from for half of their limit
        self._silence: tuple[Findings, HangVerdict] | None = None  # stacks taken then, if a process held its lock
        self._lock = threading.Lock()  # protects the budgets and the phase
        self._reporting = threading.Lock()  # held while a hang is looked at
        self._late = LateStacks()
        self._leaving = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no longer: the run ends."""
        self._leaving.set()

    def begin_again(self) -> None:
        """Forget the hang that there was: roles start again, and the run is in the phase before its first step."""
        with self._reporting, self._lock:
            self._hang, self._silence, self._stuck_since, self._asked_to_stop = None, None, None, False
            self._silent = set()
            self._phase, self._moved = START, self._clock.now()

    def culprits(self) -> list[str]:
        """List the roles that cause the reported hang, the conductor by its name; empty: none does."""
        return [] if self._hang is None else sorted({seen.role for seen in self._hang.verdict.behind})

    def phase(self, name: str) -> None:
        """Note that the run goes over to the phase `name`; empty: between two phases."""
        with self._lock:
            self._learn()
            self._phase, self._moved = name, self._clock.now()

    def waits(self) -> None:
        """Note that the run waits for something outside of it, which is no hang."""
        with self._lock:
            self._moved = self._clock.now()

    def ended(self, name: str) -> None:
        """Note that the phase `name` is over; `phase` follows."""
        with self._lock:
            self._learn()
            self._budgets.waited(name, self._clock.now() - self._moved)
            self._budgets.passed(name)

    def behind(self, error: RunError) -> BaseException | None:
        """Return the error that ends the run in place of `error`, if a hang has caused that."""
        with self._reporting:
            if self._hang is None and self._silence is not None and isinstance(error, RoleDied):
                self._report(*self._silence, Budget(self.config.timeout.heartbeat, None), silent=True)
            hang = self._hang
        if hang is None or not isinstance(error, CallTimeout | RoleDied | RunHung):
            return None
        if isinstance(error, RoleDied) and not (hang.verdict.alive and self._lost(hang.verdict)):
            return None  # the process or its node is gone
        if reason := self._restart(hang):
            return StopRequested(reason, saved=False)
        return hang.error()

    def _lost(self, verdict: HangVerdict) -> bool:
        """Tell whether a rank that causes the hang was given up since."""
        server = self.supervisor.server
        lost = {(peer.role, peer.rank) for role in self.supervisor.roles for peer in server.peers(role) if peer.lost}
        return any((seen.role, seen.rank) in lost for seen in verdict.behind)

    def _run(self) -> None:
        while not self._leaving.wait(POLL_S):
            # A reward function may keep the interpreter's lock: then ranks lose this process, and nothing here runs.
            rewarding = [thread for thread in threading.enumerate() if thread.name in _REWARDING]
            self._late.put_off(self.config.timeout.heartbeat, rewarding)
            try:
                self._look()
            except Exception:
                log.exception("the watchdog failed")
        self._late.stop()

    def _learn(self) -> float:
        """If something has moved, learn how long nothing had before; return how long nothing has moved now."""
        now, moves = self._clock.now(), self.supervisor.server.moves() + UNDER_WAY.ended
        if moves != self._moves:
            self._budgets.waited(self._phase, now - self._moved)
            self._moved, self._moves = now, moves
        return now - self._moved

    def _look(self) -> None:
        flights = self.supervisor.server.flights()
        with self._lock:
            self._clock.tick()
            engines = self.supervisor.engines
            if engines is not None and engines.all_lost:  # starts have deadlines of their own
                self._moved = self._clock.now()
            waited, phase, moved = self._learn(), self._phase, self._moved
            # No budget is larger than this share of the earliest deadline.
            ceiling = CEILING * min([flight.timeout_s for flight in flights] or [self.config.timeout.reward])
            budget = self._budgets.of(phase, ceiling, once=phase == START)
        if moved != self._stuck_since:
            self._goes_on(moved)
        self._watch_silence()
        if self._hang is None:
            if (flights or phase != START) and waited > budget.seconds:
                with self._reporting:
                    self._stuck_since, self._stuck_phase = moved, self._phase
                    found, verdict = self._ask()
                    self._report(found, verdict, budget, waited)
        elif time.monotonic() > self._act_at:
            self._act(flights)

    @property
    def _saving_s(self) -> float:
        """Return how long nothing may move while the run saves because of a hang."""
        usual = self._budgets.of("checkpoint", CEILING * self.config.timeout.checkpoint)
        return max(self.config.timeout.hang, usual.seconds)

    def _goes_on(self, moved: float) -> None:
        if self._asked_to_stop:
            # The save that the hang asked for makes progress.
            self._stuck_since, self._act_at = moved, time.monotonic() + self._saving_s
        elif self._hang is not None:
            self.note(f"the run goes on: step {self._hang.step} moves again")
            self._hang = None

    def _watch_silence(self) -> None:
        """Take the stacks while a rank is silent and not yet lost: afterwards its role cannot be asked."""
        silent = {str(peer) for peer in self.supervisor.server.silent(self.config.timeout.heartbeat / 2)}
        if silent - self._silent and self._hang is None:
            with self._reporting:
                self._stuck_phase = self._phase
                found, verdict = self._ask()
                held = any(seen.source == "lock" for seen in verdict.behind)
                self._silence = (found, verdict) if held else None
        elif not silent and self._silence is not None and not self._lost(self._silence[1]):
            self._silence = None
        self._silent = silent

    def _ask(self) -> tuple[Findings, HangVerdict]:
        self._late.stop()  # ranks may take long to answer
        found = ask_ranks(self.supervisor, self.directory, self.config.timeout)
        return found, self._judge(found)

    def _judge(self, found: Findings) -> HangVerdict:
        return judge(found.ranks, found.conductor, self.config.vllm.tensor_parallel_size)

    def _report(
        self, found: Findings, verdict: HangVerdict, budget: Budget, waited: float = 0.0, silent: bool = False
    ) -> None:
        """Write and note the findings; `silent`: a rank was given up, so that no rank can be asked any more."""
        paths = ((self.directory.hang(self.step(), number), number) for number in count(1))
        where, attempt = next(each for each in paths if not os.path.exists(each[0]))  # false if the disk fails
        with contextlib.suppress(OSError):
            where.mkdir(parents=True)
            look_from_outside(found, self.supervisor)
            verdict = verdict if silent else self._judge(found)
        hang = Hang(self.step(), self._stuck_phase, verdict, where, attempt)
        grace_s = max(self.config.timeout.hang_grace, budget.ends_s - waited)
        if not self.supervisor.server.flights():  # users' code that fails at its deadline need not end the run
            grace_s = max(grace_s, UNDER_WAY.longest_s())
        cause = "a rank has sent no heartbeat" if silent else f"nothing has moved for {waited:.0f} s ({budget.words()})"
        paragraph = (
            f"step {hang.step} hangs in {_phase_words(hang.phase)}: {cause}; {verdict.words}. Stacks of all ranks, the "
            f"last messages and the load of the nodes are in {where}/. {self._next(hang, silent, grace_s)}"
        )
        with contextlib.suppress(OSError):
            take_flights(self.directory.logs, found.when, where)
            write_findings(found, verdict, paragraph, where)
        self._hang = hang
        self._act_at = time.monotonic() + grace_s
        self.note_hang(paragraph)

    def _next(self, hang: Hang, silent: bool, grace_s: float) -> str:
        key = f"train.on_hang = {self.config.train.on_hang}"
        ends = "ends and starts again" if self._restart(hang) else "ends with an error"
        if self.config.train.on_hang == "restart" and not self._restart(hang):
            key += f", but this step has hung {hang.attempt} times"
        if silent:
            return f"The run {ends} ({key})."
        return f"If nothing moves for {grace_s:.4g} s more, the run {ends} ({key})."

    def _restart(self, hang: Hang) -> Reason | None:
        if self.config.train.on_hang != "restart" or hang.attempt > MOST_RESTARTS:
            return None
        return Reason(f"a hang in {_phase_words(hang.phase)} of step {hang.step}: {hang.where}", True, 1)

    def _act(self, flights: Sequence[Flight]) -> None:
        """End the run: with a checkpoint where the trainers wait for work, without one where they hang."""
        assert self._hang is not None
        hang = self._hang
        if not hang.verdict.alive:
            return  # missing heartbeats end the run where a process or a node is gone
        stuck = any(ROLES[flight.peer.role].kind == "trained" for flight in flights)
        if not stuck and not self._asked_to_stop and self.stop.can_drop:
            self._asked_to_stop = True
            self._act_at = time.monotonic() + self._saving_s
            what = f"a hang in {_phase_words(hang.phase)} of step {hang.step}: {hang.where}"
            self.stop.ask(self._restart(hang) or Reason(what, False, 1))
            return
        log.error("%s", hang.error())
        self._act_at = float("inf")
        self.supervisor.fail(hang.error())


def _phase_words(phase: str) -> str:
    return f"phase {phase}" if phase else "no phase"

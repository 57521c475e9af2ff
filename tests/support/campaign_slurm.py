"""A campaign of the faults of a cluster: each of a run's jobs goes on from a fault and meets the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from cluster_faults import REST_S, ClusterFaults, Job, Jobs, Struck
from slurm_cluster import ENDLESS, OVER, Cluster

from slurm_rlhf.campaign.faults import ANY, CONDUCTOR, PHASES, Fault
from slurm_rlhf.campaign.session import Session
from slurm_rlhf.campaign.verdicts import Observation, Row, judge, unequal
from slurm_rlhf.campaign.watch import watch
from slurm_rlhf.errors import RunError
from slurm_rlhf.observe.jsonl import read_rows
from slurm_rlhf.polling import wait_until

STEPS_EACH, FEWEST_STEPS = 16, 40
"""Length of the calm run: for each fault the steps before and after it."""
MOVING = ("crash", "network cut")
"""Beginnings of kinds after which ranks are elsewhere: the next fault meets a new job, with all nodes."""


class ClusterCampaign:
    """Runs faults one after the other. `config`: the workload, in the directory that all nodes see."""

    def __init__(self, slurm: Cluster, config: Path, seed: int, *options: str) -> None:
        """`options`: of every run."""
        self._slurm, self._config, self._options = slurm, config, options
        self._run_dir = config.parent / "campaign"
        self._start = Jobs(slurm)
        self._faults = ClusterFaults(slurm, config, self._run_dir, seed)
        self._session: Session | None = None
        self._ended: list[tuple[Fault, Observation]] = []  # they wait for a job that goes on
        self._borne: list[tuple[Fault, Observation]] = []  # they wait for the end of their job
        self._calm: list[dict] = []

    def run(self, faults: Sequence[Fault]) -> Iterator[Row]:
        """Yield a row for each fault, some later than others."""
        steps = max(FEWEST_STEPS, STEPS_EACH * len(faults))
        calm = self._session_in(self._run_dir.with_name("calm"), f"--train.max_steps={steps}")
        self._slurm.wait_until(lambda: calm.over, "end of the calm run")
        assert calm.process.poll() == 0, calm.process.output()
        self._calm = read_rows(calm.directory.metrics)
        for fault in faults:
            session = self._session = self._session or self._session_in(self._run_dir, *ENDLESS)
            yield from self._after_a_step(session)
            seen = Observation()
            try:
                self._strike(session, fault, seen)
            except RunError as error:
                seen.error = str(error)
            if seen.ended_s is None:
                self._compare(seen, session)
                self._borne.append((fault, seen))
                if fault.kind.startswith(MOVING) or seen.error:
                    yield from self._leave(session)
            else:
                yield from self._settled()
                self._ended.append((fault, seen))
                self._session = None
        session = self._session or self._session_in(self._run_dir, *ENDLESS)
        yield from self._after_a_step(session)
        yield from self._leave(session)

    def _session_in(self, run_dir: Path, *overrides: str) -> Session:
        return Session(self._start, self._config, run_dir, *self._options, *overrides)

    def _after_a_step(self, session: Session) -> Iterator[Row]:
        """Wait until the job has done steps: it goes on after the faults before."""
        self._slurm.wait_until(lambda: session.began_at is not None or session.over, "start of the run")
        begun = session.began_at or 0
        session.wait_for_step(max(begun + 1, session.steps if self._ended else 0))
        ended, self._ended = self._ended, []
        for fault, seen in ended:
            seen.resumed, seen.resumed_at = True, begun
            self._compare(seen, session)
            yield judge(fault, seen)

    def _compare(self, seen: Observation, session: Session) -> None:
        after = min(seen.checkpoint, seen.resumed_at) if seen.resumed else seen.checkpoint
        rows = [row for row in read_rows(session.directory.metrics) if row["step"] > after]
        seen.compared, seen.unequal = unequal(rows, self._calm)

    def _settled(self) -> Iterator[Row]:
        borne, self._borne = self._borne, []
        for fault, seen in borne:
            yield judge(fault, seen)

    def _leave(self, session: Session) -> Iterator[Row]:
        """End a job in order, and look what it has left; the last fault answers for that."""
        session.stop()
        self._slurm.wait_until(lambda: session.over, "end of the job")
        if self._borne:
            self._faults.look_at_rest(self._borne[-1][1], self._slurm.names)
        yield from self._settled()
        self._session = None

    def _strike(self, session: Session, fault: Fault, seen: Observation) -> None:
        seen.printed, first = len(session.process.output()), session.count_events()
        now = session.phase_now() if fault.phase == ANY else session.meet_phase(PHASES[fault.phase])
        seen.checkpoint = session.checkpoint
        struck = self._faults.do(fault, session.count_events)
        seen.hit_phase, seen.hit_step, seen.pid, seen.nodes = now.phase, now.step, struck.pid, struck.nodes
        try:
            seen.told = "\n".join(session.events(first)) + "\n"
            requeues = _requeues(session)
            watch(session, fault, seen, struck.events, struck.at, partial(self._bring_back, fault, seen, struck))
            seen.requeued = _requeues(session) > requeues
            seen.resumed_at = (session.goes_from or 0) if seen.requeued else 0
            crashed = struck.nodes if fault.kind.startswith("crash") else ()
            if fault.kind == "network cut":
                seen.orphans += self._faults.left_alone(struck.nodes[0])
            if seen.ended_s is not None:
                self._faults.look_at_rest(seen, [node for node in self._slurm.names if node not in crashed])
                if "cut off" in fault.says:
                    _over(self._slurm, session)
                    seen.told += self._faults.status()
        finally:
            struck.heal()

    def _bring_back(self, fault: Fault, seen: Observation, struck: Struck) -> None:
        """Restart the conductor's node, when all ranks on the others have left: then Slurm requeues the job."""
        if fault.target == f"node of {CONDUCTOR}":
            alive = [node for node in self._slurm.names if node not in struck.nodes]
            seen.orphans += [] if seen.went_on else self._faults.lonely(*alive)
            struck.heal()


def _over(slurm: Cluster, session: Session) -> None:
    """Wait until Slurm says how the job ended: until then its conductor may be saving."""
    assert isinstance(session.process, Job)
    number = session.process.number
    wait_until(lambda: slurm.job(number)["JobState"] in OVER, REST_S, 0.2, 0.2)


def _requeues(session: Session) -> int:
    assert isinstance(session.process, Job)
    return session.process.requeues

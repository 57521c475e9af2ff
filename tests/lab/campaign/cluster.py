"""A campaign on the emulated Slurm: who does faults to the jobs of a run, and looks at what they leave."""

from __future__ import annotations

from functools import partial

from holds import Holds
from slurm_cluster import COMMAND, OVER, Cluster
from waiting import scaled

from campaign import processes
from campaign.cluster_faults import REST_S, ClusterFaults, Job, ranks, start_job
from campaign.faults import CONDUCTOR, Fault
from campaign.injection import Hit
from campaign.session import Session
from campaign.verdicts import Observation
from slurm_rlhf.polling import wait_until

STEPS_EACH, FEWEST_STEPS = 16, 40
"""Length of the calm run: for each fault the steps before and after it."""
MOVING = ("crash", "network cut")
"""Beginnings of kinds after which ranks are elsewhere: the next fault meets a new job, with all nodes."""
LONELY_S = scaled(40.0)
"""Time for processes on a node that is cut off to see that their conductor is gone, and to leave."""


class OnSlurm:
    """Implements `campaign.leader.Site`: runs as jobs."""

    def __init__(self, slurm: Cluster, seed: int) -> None:
        self.start = partial(start_job, slurm)
        self._slurm = slurm
        self._seed = seed
        self._requeues = 0

    def prepare(self, session: Session, fault: Fault, holds: Holds) -> None:
        """Implements `Site`: a target is looked up on its node."""

    def strike(self, session: Session, fault: Fault, holds: Holds, seen: Observation) -> Hit:
        self._requeues = _job(session).requeues
        hit = ClusterFaults(self._slurm, holds, session.directory.root, self._seed).do(fault, session.count_events)
        hit.undo = partial(self._bring_back, session, fault, seen, hit)
        return hit

    def look_after(self, session: Session, fault: Fault, seen: Observation, hit: Hit) -> None:
        seen.requeued = _job(session).requeues > self._requeues
        seen.resumed_at = (session.goes_from or 0) if seen.requeued else 0
        if fault.kind == "network cut" and hit.nodes[0] not in self._used(session):
            seen.orphans += self._lonely(session, hit.nodes[0])
        if seen.ended_s is not None:
            crashed = hit.nodes if fault.kind.startswith("crash") else ()
            self._look_at(session, seen, *(node for node in self._slurm.names if node not in crashed))
        if seen.ended_s is not None and "cut off" in fault.says:
            # The conductor of a job may be saving until Slurm says how the job ended.
            over = _job(session).number
            wait_until(lambda: self._slurm.job(over)["JobState"] in OVER, REST_S, 0.2, 0.2)
            seen.stated += self._slurm.run(COMMAND, "status", str(session.directory.root))

    def look_at_rest(self, session: Session, seen: Observation) -> None:
        self._look_at(session, seen, *self._slurm.names)

    def moves(self, fault: Fault) -> bool:
        return fault.kind.startswith(MOVING)

    def _bring_back(self, session: Session, fault: Fault, seen: Observation, hit: Hit) -> None:
        """Restart the conductor's node, when all ranks on the others have left: then Slurm requeues the job."""
        if fault.target == f"node of {CONDUCTOR}":
            alive = [node for node in self._slurm.names if node not in hit.nodes]
            seen.orphans += [] if seen.went_on else self._lonely(session, *alive)
            hit.heal()

    def _used(self, session: Session) -> set[str]:
        return {share["node"] for shares in ranks(session.directory.root).values() for share in shares}

    def _lonely(self, session: Session, *nodes: str) -> list[str]:
        """List processes that do not leave by themselves on nodes that hear nothing of the conductor any more."""
        left, root = self._slurm.left, session.directory.root
        wait_until(lambda: not left(root, *nodes), LONELY_S, 0.2, 0.5)
        return [f"process {line[:160]} on {node}" for node in nodes for line in left(root, node)]

    def _look_at(self, session: Session, seen: Observation, *nodes: str) -> None:
        """Note what an ended job has left on the nodes that live."""
        left, root = self._slurm.left, session.directory.root
        wait_until(lambda: not left(root, *nodes), REST_S, 0.2, 0.2)
        seen.orphans += [f"process {line[:160]}" for line in left(root, *nodes)]
        for node in nodes:
            files = self._slurm.cluster("exec", node, "ls", "-A", "/dev/shm").split()
            seen.shared_memory += [f"/dev/shm/{name} on {node}" for name in files]
        seen.locks += [f"lock {path}" for path in processes.held_locks(root)]


def _job(session: Session) -> Job:
    assert isinstance(session.process, Job)
    return session.process

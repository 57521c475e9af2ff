"""End a job that has lost its first node, and the conductor with it.

With `--no-kill` Slurm leaves such a job as it is: it would keep its other nodes, idle, until its time is over. So the
agent of engines on another node, whose ranks have left, stays. It waits until slurmctld has marked the first node down
(SlurmdTimeout) and requeues the job, or cancels it where it is not to be requeued. Without `--no-kill` Slurm requeues
or ends the job itself, and the agent with it.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.cluster.network import unreachable
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.cluster.slurm_job import Job, ask_jobs, command
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.facts import StepSpec
from slurm_rlhf.nodes.requeue import is_away
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory, write_atomically

SUCCESSORS = 2
"""Nodes that wait: one acts where the other is down, too."""
_FIRST_S = 2.0
_LONGEST_S = 15.0
"""Between two questions to slurmctld, which last for minutes."""

WAIT, LEAVE, REQUEUE, CANCEL = "wait", "leave", "requeue", "cancel"


def successors(ranks: RankMap, first: str) -> list[str]:
    """Return the nodes that wait: the first ones with an engine that are not `first`."""
    nodes = (share.node for share in ranks.roles.get(ROLLOUT, ()) if share.node != first)
    return list(dict.fromkeys(nodes))[:SUCCESSORS]


def decide(job: Job | None, restarts: int, chain: bool) -> str:
    """Say what is to be done: WAIT, LEAVE, REQUEUE or CANCEL.

    `job`: as slurmctld has it now, None if it has forgotten it; `restarts`: how often it was requeued when this process
    was started; `chain`: another job goes on with the run.
    """
    if job is None or "RUNNING" not in job.state.split(",") or job.restarts not in (str(restarts), ""):
        return LEAVE
    if not job.is_headless:
        return WAIT
    return CANCEL if chain or job.requeue == "0" else REQUEUE


def mark(run_dir: Path, job: str, restarts: int) -> Path:
    """Name the file of who ends a start of a job: it is made once, and says what was done."""
    return run_dir / ".control" / f"headless.{job}.{restarts}"


def last_words(run_dir: Path, job: Job) -> str:
    """Return what ended the newest start of a job that has lost its first node; empty: nothing has."""
    count = int(job.restarts or 0)
    for restarts in (count, count - 1):  # cancelled, requeued
        with suppress(OSError):
            return mark(run_dir, job.number, restarts).read_text(encoding="utf-8").strip()
    return ""


@dataclass(slots=True)
class Successor:
    """Watches on `node` whether the first node of the job is lost, and ends or requeues the job then."""

    job: str  # number of the job
    restarts: int
    first: str
    node: str
    run_dir: Path
    endpoint: tuple[str, int]  # address and port of the conductor
    chain: bool = False
    _claimed: bool = field(default=False, init=False)

    def settled(self) -> bool:
        """Look once, and act if it is to; return whether nothing is left to do. Blocks for 30 s at most."""
        if not unreachable(*self.endpoint):  # it was stopped, or this node was cut off
            return True
        try:
            jobs = ask_jobs(self.job)
        except RunError:  # slurmctld is away, too
            return False
        job = next((job for job in jobs if job.number == self.job), None)
        what = decide(job, self.restarts, self.chain)
        if job is None or what in (WAIT, LEAVE):
            return what == LEAVE
        if not self._claim():
            return True
        self._act(job, what)
        return False

    def _claim(self) -> bool:
        """Tell whether this process is the one that acts."""
        if not self._claimed:
            try:
                mark(self.run_dir, self.job, self.restarts).touch(exist_ok=False)
            except FileExistsError:
                return False
            except OSError as error:  # the disk is full: the count of restarts is the only guard
                print(error, flush=True)
            self._claimed = True
        return True

    def _act(self, job: Job, what: str) -> None:
        """Requeue the job, or cancel it where that is refused. Slurm ends this process with it."""
        why = f"its first node {self.first} was down, and with it the conductor"
        if what == REQUEUE:
            self._say(f"{why}: {self.node} has requeued it")  # before: there may be no time afterwards
            refused = command(["scontrol", "requeue", job.id])
            if refused.returncode == 0:
                return
            if is_away(refused.stderr):
                return
            why += f" (scontrol requeue: {refused.stderr.strip()})"
        self._say(f"{why}: {self.node} has cancelled it")
        command(["scancel", job.id])

    def _say(self, text: str) -> None:
        print(text, flush=True)
        with suppress(OSError):
            write_atomically(mark(self.run_dir, self.job, self.restarts), f"{text}\n")


def await_end(spec: StepSpec, ranks: RankMap, node: str, endpoint: tuple[str, int]) -> None:
    """Wait for the end of a job whose conductor, at `endpoint`, is gone, and see to it; this process ends with it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # scancel ends it at once, and it requeues no cancelled job
    slurm = read_slurm(os.environ)
    if slurm is None or node not in successors(ranks, slurm.job_nodes[0]):
        return
    job, first, run_dir = str(slurm.job_id), slurm.job_nodes[0], Path(spec.run_dir)
    by_hand = f"scontrol requeue {job}, where that has not happened yet: it goes on from the newest checkpoint, if any"
    if shutil.which("scontrol") is None:
        print(f"{node} does not hear {first}, and there is no scontrol here (a container?) to ask: {by_hand}")
        return
    config = load_config(RunDirectory(run_dir).config, [])
    limit_s = config.timeout.node_down
    successor = Successor(job, slurm.restart_count, first, node, run_dir, endpoint, config.slurm.chain)
    print(f"{node} waits for slurmctld to mark {first} down, {limit_s:g} s at most (timeout.node_down)", flush=True)
    if not wait_until(successor.settled, limit_s, _FIRST_S, _LONGEST_S):
        print(f"slurmctld has not marked {first} down within {limit_s:g} s (timeout.node_down): {by_hand}")

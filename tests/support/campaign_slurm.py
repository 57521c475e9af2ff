"""Faults of a cluster: a run on the emulated Slurm; each of its jobs goes on from a fault and meets the next."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_cluster import COMMAND, ENDLESS, OVER, Cluster, said
from training_runs import is_worker

from slurm_rlhf.campaign.faults import CONDUCTOR, PHASES, Fault
from slurm_rlhf.campaign.session import Session
from slurm_rlhf.campaign.verdicts import Observation, Row, judge, unequal
from slurm_rlhf.campaign.watch import watch
from slurm_rlhf.observe.jsonl import read_rows

OPTIONS = ("--nodes=4", "--gres=gpu:8", "--cpus-per-task=16")
RANKS = ("--actor.num_gpus_per_node=1", *ENDLESS)
CALM_STEPS = 150


class Job:
    """Implements `slurm_rlhf.campaign.session.Started`: a job of the run."""

    pid = -1
    """Its processes are on the nodes, and not this process's."""

    def __init__(self, slurm: Cluster, config: Path, run_dir: Path, overrides: Sequence[str] = ()) -> None:
        self._slurm, self._run_dir = slurm, run_dir
        self._before = len(said(run_dir)) if Path(f"{run_dir}.log").exists() else 0
        self.number = slurm.submit(config, run_dir, list(OPTIONS), *RANKS, *overrides)

    def poll(self) -> int | None:
        job = self._slurm.job(self.number)
        return int(job["ExitCode"].split(":")[0]) if job["JobState"] in OVER else None

    def output(self) -> str:
        file = Path(f"{self._run_dir}.log")
        return file.read_text(errors="replace")[self._before :] if file.exists() else ""


@dataclass(frozen=True, slots=True)
class Struck:
    """What was done."""

    pid: int = 0
    node: str = ""
    heal: Callable[[], None] = lambda: None


class ClusterCampaign:
    """Runs faults one after the other. `config`: the workload, in the directory that all nodes see."""

    def __init__(self, slurm: Cluster, config: Path) -> None:
        self._slurm, self._config = slurm, config
        self._run_dir = slurm.shared / "campaign"
        self._waiting: list[tuple[Fault, Observation]] = []
        self._calm: list[dict] = []

    def run(self, faults: Sequence[Fault]) -> Iterator[Row]:
        calm = Job(self._slurm, self._config, self._run_dir.with_name("calm"), [f"--train.max_steps={CALM_STEPS}"])
        assert self._slurm.wait_over(calm.number, 300) == ("COMPLETED", 0), calm.output()
        self._calm = read_rows(self._run_dir.with_name("calm") / "metrics.jsonl")
        session: Session | None = None
        for fault in faults:
            session = session or self._open()
            yield from self._after_a_step(session)
            seen = Observation()
            self._strike(session, fault, seen)
            if seen.ended_s is None:
                yield self._row(fault, seen, session)
                continue
            self._waiting.append((fault, seen))
            session = None
        session = session or self._open()
        yield from self._after_a_step(session)
        session.stop()
        self._slurm.wait_until(lambda: session.over, "end of the last job", 60)

    def _open(self) -> Session:
        return Session(lambda words: Job(self._slurm, self._config, self._run_dir), self._config, self._run_dir)

    def _after_a_step(self, session: Session) -> Iterator[Row]:
        """Wait until the job has done steps: it goes on after the faults before."""
        self._slurm.wait_until(lambda: session.began_at is not None or session.over, "start of the run", 240)
        begun = session.began_at or 0
        session.wait_for_step(max(begun + 1, session.steps if self._waiting else 0))
        waiting, self._waiting = self._waiting, []
        for fault, seen in waiting:
            seen.resumed, seen.resumed_at = True, begun
            yield self._row(fault, seen, session)

    def _row(self, fault: Fault, seen: Observation, session: Session) -> Row:
        after = min(seen.checkpoint, seen.resumed_at) if seen.resumed else seen.checkpoint
        rows = [row for row in read_rows(session.directory.metrics) if row["step"] > after]
        seen.compared, seen.unequal = unequal(rows, self._calm)
        return judge(fault, seen)

    def _strike(self, session: Session, fault: Fault, seen: Observation) -> None:
        session.wait_for_phase(PHASES[fault.phase], session.steps)
        known, now, seen.checkpoint = session.count_events(), session.phase(), session.checkpoint
        assert now is not None
        seen.printed = len(session.process.output())
        began = time.monotonic()
        struck = self._inject(fault)
        seen.hit_phase, seen.hit_step, seen.pid, seen.node = now.phase, now.step, struck.pid, struck.node
        watch(session, fault, seen, known, began)
        alive = [node for node in self._slurm.names if fault.kind != "crash" or node != struck.node]
        if seen.ended_s is not None:
            self._look_at_rest(seen, alive)
            if "cut off" in fault.says:
                seen.told += self._slurm.run(COMMAND, "status", str(self._run_dir))
        struck.heal()

    def _look_at_rest(self, seen: Observation, nodes: Sequence[str]) -> None:
        """What is left on the nodes that live, 10 s after the end of the job."""
        end = time.monotonic() + 10
        while (left := self._slurm.left(self._run_dir, *nodes)) and time.monotonic() < end:
            time.sleep(0.2)
        seen.orphans = [f"process {line[:160]}" for line in left]
        for node in nodes:
            files = self._slurm.cluster("exec", node, "ls", "-A", "/dev/shm").split()
            seen.shared_memory += [f"/dev/shm/{name} on {node}" for name in files]

    # --- what is done ----------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> Struck:
        slurm, (what, _, rank) = self._slurm, fault.target.rpartition(" of ")
        if fault.target == "slurmctld":
            slurm.cluster("restart-controller")
            return Struck()
        role, _, number = rank.partition(" rank ")
        node = slurm.names[0] if what == "srun" or rank == CONDUCTOR else self._node(role, int(number))
        if fault.kind in ("crash", "network cut"):
            slurm.cluster("crash" if fault.kind == "crash" else "cut", node)
            return Struck(0, node, lambda: self._heal(fault.kind, node))
        pid = min(pid for pid, line in slurm.numbered(node) if self._is_meant(what or rank, role, line))
        os.kill(pid, getattr(signal, fault.kind))
        return Struck(pid, node)

    def _heal(self, kind: str, node: str) -> None:
        if kind == "crash":
            self._slurm.restart(node)
        else:
            self._slurm.cluster("uncut", node)

    def _is_meant(self, what: str, role: str, line: str) -> bool:
        """Whether a command line is that of a target: a rank, srun, slurmd, the conductor."""
        if what == "srun":
            return "srun" in line.split(maxsplit=1)[0] and f"--job-name={role}" in line
        if what == "slurmd":
            return "slurmd -D" in line
        mine = f"--run_dir={self._run_dir}" in line
        if what == CONDUCTOR:
            return mine and " train " in line and "srun" not in line
        return mine and is_worker(line) and f"--role={role}" in line

    def _node(self, role: str, rank: int) -> str:
        """The node of a rank; the conductor is where the actor's rank 0 is."""
        shares = json.loads((self._run_dir / "rank_map.json").read_text())["roles"][role]
        return next(share["node"] for share in shares if rank in share["ranks"])

"""Runs as jobs of the emulated Slurm for the campaign, and the faults that only a cluster has."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holds import Holds
from slurm_cluster import OVER, Cluster, said
from tiny_models import make_reward
from waiting import scaled

from campaign import processes
from campaign.faults import CONDUCTOR, Fault
from campaign.injection import CLOCK, Hit
from slurm_rlhf.errors import RunError
from slurm_rlhf.polling import wait_until

OPTIONS = ("--nodes=4", "--gres=gpu:8", "--cpus-per-task=16", "--no-kill")
RANKS = ("--actor.num_gpus_per_node=1", f"--timeout.connect={scaled(90)}")
"""The actor on two nodes, the engines on the two others. At a load of 24 ranks have said hello after 45 s. A node that
dies before its ranks say hello is missed by its engine's silence after 12 s, and its ranks after 90 s."""
SPARES = ("--cluster.spares=2", "--vllm.num_engines=1", "--vllm.num_nodes=1", f"--timeout.connect={scaled(55)}")
"""Two nodes, and two in reserve. These have no engine: of them nothing was heard, so 55 s alone tell that they died."""
GROUPS = ("actor", "critic", "ref", "reward")
NODES = {"crash": ("crash", "restart"), "network cut": ("cut", "uncut")}
"""Kind of a fault -> the words of slurm_cluster.sh that do it and undo it."""
ASK_S = 0.5
OTHER_S = scaled(10.0)
"""The most from the first node's stand-in to its own end."""
MOVED_S = scaled(60.0)
REST_S = scaled(20.0)
"""For what is left of a run on its nodes, from the end of its job. Slurm refuses an srun whose conductor was killed to
end its step where the job has just ended; then the ranks leave when they miss the conductor, after 12 s."""


def layout(work: Path, each: int) -> tuple[str, ...]:
    """Options for `each` ranks of a role on a node, among the roles a reward model, which is written to `work`."""
    model = make_reward(work / "reward_model")
    return (
        *(f"--{group}.num_gpus_per_node={each}" for group in GROUPS),
        *(f"--rollout.batch_size={4 * each}", f"--train.batch_size={8 * each}"),
        *("--reward.remote_url=", f"--reward.model_name_or_path={model}", f"--timeout.connect={scaled(120)}"),
    )


class Job:
    """Implements `campaign.session.Started`: a job of a run."""

    pid = -1
    """Its processes are on the nodes, and not this process's."""

    def __init__(self, slurm: Cluster, config: Path, run_dir: Path, overrides: Sequence[str]) -> None:
        self._slurm, self._run_dir = slurm, run_dir
        self._before = len(said(run_dir)) if Path(f"{run_dir}.log").exists() else 0
        self.number = slurm.submit(config, run_dir, list(OPTIONS), *RANKS, *overrides)
        self._asked_at = time.monotonic()
        self._code: int | None = None
        self.requeues = 0

    def poll(self) -> int | None:
        """Ask slurmctld once in `ASK_S` at most; while it does not answer, the job goes on."""
        if self._code is None and time.monotonic() > self._asked_at + ASK_S:
            self._asked_at = time.monotonic()
            with contextlib.suppress(AssertionError):
                job = self._slurm.job(self.number)
                code, number = map(int, job["ExitCode"].split(":"))
                self.requeues = int(job["Restarts"])
                # A job whose node is gone completes for minutes; its conductor has ended, unless it starts again.
                over = OVER if self.requeues else {*OVER, "COMPLETING"}
                self._code = (code or -number) if job["JobState"] in over else None
        return self._code

    def output(self) -> str:
        file = Path(f"{self._run_dir}.log")
        return file.read_text(errors="replace")[self._before :] if file.exists() else ""

    def kill(self) -> None:
        self._slurm.run("scancel", str(self.number))


def start_job(slurm: Cluster, words: Sequence[str]) -> Job:
    """Submit a run; without its cluster this is a `campaign.session.Start`."""
    command, config, run_dir, *overrides = words
    assert command == "train"
    return Job(slurm, Path(config), Path(run_dir.removeprefix("--run_dir=")), overrides)


def ranks(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Role -> which of its ranks are on which node now."""
    return dict(json.loads((run_dir / "rank_map.json").read_text())["roles"])


class ClusterFaults:
    """Does faults to the run in `run_dir`."""

    def __init__(self, slurm: Cluster, holds: Holds, run_dir: Path, seed: int) -> None:
        self._slurm, self._holds, self._run_dir, self._seed = slurm, holds, run_dir, seed
        self._down: set[str] = set()  # nodes of which something is to be healed

    def do(self, fault: Fault, count_events: Callable[[], int]) -> Hit:
        """Raises RunError where the target is not there."""
        slurm, known = self._slurm, count_events()
        if fault.target == "slurmctld":
            hit = Hit(events=known)
            slurm.cluster("restart-controller")
            return hit
        if fault.kind == "crash, one after the other":
            return self._crash_two(fault, count_events)
        what, _, rank = fault.target.rpartition(" of ")
        role, _, number = rank.partition(" rank ")
        node = slurm.names[0] if what == "srun" or rank == CONDUCTOR else self.node(role, int(number))
        if what == "node":
            return self._hit_node(fault.kind, node, known, conductors=rank == CONDUCTOR)
        pid = self._victim(what or rank, role, int(number or 0), node)
        hit = Hit(pid, events=known, nodes=(node,))
        os.kill(pid, getattr(signal, fault.kind))
        if what == "slurmd":
            hit.heal = self._healing(node, "restart-slurmd")
        return hit

    def _hit_node(self, kind: str, node: str, known: int, conductors: bool = False) -> Hit:
        slurm, hit = self._slurm, Hit(events=known, nodes=(node,))
        if kind.startswith("clock jump "):
            clock = f"clock.{node}"
            self._holds.hold(clock, str(CLOCK[kind.removeprefix("clock jump ")]))
            hit.heal = partial(self._holds.let_go, clock)
            return hit
        if (node == slurm.names[0] and not conductors) or node in self._down:
            raise RunError(f"{node} is the conductor's, or broken already")
        how, back = NODES[kind]
        slurm.cluster(how, node)
        hit.heal = self._healing(node, back)
        return hit

    def _healing(self, node: str, how: str) -> Callable[[], object]:
        self._down.add(node)

        def heal() -> None:
            if node not in self._down:
                return
            if how == "restart":
                self._slurm.restart(node)
            else:
                self._slurm.cluster(how, node)
            self._down.discard(node)

        return heal

    def _crash_two(self, fault: Fault, count_events: Callable[[], int]) -> Hit:
        """Crash a node, and while its ranks start on another one that node, too."""
        rank = int(fault.target.partition(",")[0].rpartition(" ")[2])
        first = self.node("actor", rank)
        one = self._hit_node("crash", first, 0)
        if not wait_until(lambda: self.node("actor", rank) != first, MOVED_S):
            one.heal()
            raise RunError(f"no stand-in for {first} within {MOVED_S:g} s")
        time.sleep(random.Random(f"{self._seed} {fault.name}").uniform(0.0, OTHER_S))
        two = self._hit_node("crash", self.node("actor", rank), count_events())
        return Hit(heal=lambda: (one.heal(), two.heal()), at=two.at, events=two.events, nodes=(first, *two.nodes))

    def _victim(self, what: str, role: str, number: int, node: str) -> int:
        """The process that a target means: a rank, srun, slurmd, the conductor."""
        if " rank " in what:
            found = processes.rank(self._run_dir, role, number, node)
            pids = [found.pid] if found else []
        else:
            pids = [pid for pid, line in self._slurm.numbered(node) if self._is_meant(what, role, line)]
        if not pids:
            raise RunError(f"{what} of {role} is not on {node}")
        return min(pids)

    def _is_meant(self, what: str, role: str, line: str) -> bool:
        if what == "srun":
            return "srun" in line.split(maxsplit=1)[0] and f"--job-name={role}" in line
        if what == "slurmd":
            return "slurmd -D" in line
        return f"--run_dir={self._run_dir}" in line and " train " in line and "srun" not in line

    def node(self, role: str, rank: int) -> str:
        """The node of a rank; the conductor is where the job's first node is."""
        found = [share["node"] for share in ranks(self._run_dir).get(role, ()) if rank in share["ranks"]]
        if not found:
            raise RunError(f"{role} has no rank {rank} now")
        return str(found[0])

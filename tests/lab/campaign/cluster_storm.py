"""Bad weather on the emulated Slurm: again and again a fault of a cluster strikes a long run."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from holds import Holds
from slurm_cluster import Cluster

from campaign.cluster import OnSlurm
from campaign.cluster_faults import ClusterFaults, Jobs
from campaign.faults import ANY, BORNE, CONDUCTOR, on_cluster
from campaign.session import Session
from campaign.storm import Blow, Storm
from campaign.verdicts import Observation, patterns
from slurm_rlhf.errors import RunError

WEATHER = tuple(
    fault
    for fault in on_cluster(1)
    if fault.phase != ANY and "one after the other" not in fault.kind and fault.target != f"node of {CONDUCTOR}"
)
HEAL_S = 20.0
"""From a fault to its end: longer than `timeout.heartbeat` of the runs."""
TRIES = 50
RESTARTS = ("--train.max_restarts=20", "--train.max_engine_restarts=20", "--train.num_episodes=1000")


class Weather:
    """Strikes a run; nodes and daemons come back after `HEAL_S`."""

    def __init__(self, slurm: Cluster, out: Path, seed: int) -> None:
        """`out`: the directory of a `Storm`."""
        self._site = OnSlurm(slurm, seed)
        self._faults = ClusterFaults(slurm, Holds(out / "work" / "run.toml"), out / "run", seed)
        self._healing: list[threading.Timer] = []

    def strike(self, session: Session, dice: random.Random) -> Blow:
        """Implements `campaign.storm.Strike`."""
        for _ in range(TRIES):
            fault = dice.choice(WEATHER)
            try:
                struck = self._faults.do(fault, session.count_events)
            except (RunError, ProcessLookupError):
                continue  # its target is just being started again
            self._healing.append(threading.Timer(HEAL_S, struck.heal))
            self._healing[-1].start()
            says = "|".join(patterns(fault, Observation(pid=struck.pid, nodes=struck.nodes)))
            at = time.time() - (time.monotonic() - struck.at)
            return Blow(f"{fault.kind}: {fault.target}", at, "" if fault.does == BORNE else says)
        raise RunError(f"{TRIES} faults were drawn, and none had its target")

    def rest(self, session: Session, seen: Observation) -> None:
        """Look what an ended job has left, when all nodes are back."""
        for timer in self._healing:
            timer.join()
        self._healing.clear()
        self._site.look_at_rest(session, seen)


def cluster_storm(slurm: Cluster, seed: int, steps: int, every_s: float, pace_s: float) -> Storm:
    """A storm whose runs are jobs."""
    out = slurm.shared / "storm"
    weather = Weather(slurm, out, seed)
    return Storm(out, Jobs(slurm), seed, steps, every_s, weather.strike, weather.rest, pace_s, RESTARTS)

"""Bad weather on the emulated Slurm: again and again a fault of a cluster strikes a long run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cluster_faults import ClusterFaults, Jobs
from slurm_cluster import Cluster

from slurm_rlhf.campaign.faults import ANY, BORNE, CONDUCTOR, on_cluster
from slurm_rlhf.campaign.session import Session
from slurm_rlhf.campaign.storm import Blow, Storm
from slurm_rlhf.campaign.verdicts import Observation, patterns
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
    """Strikes the run in `run_dir`; nodes and daemons come back after `HEAL_S`."""

    def __init__(self, slurm: Cluster, config: Path, run_dir: Path, seed: int) -> None:
        self._slurm, self._faults = slurm, ClusterFaults(slurm, config, run_dir, seed)
        self._healing: list[threading.Timer] = []

    def strike(self, session: Session, dice: random.Random) -> Blow:
        """Implements `slurm_rlhf.campaign.storm.Strike`."""
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
        self._faults.look_at_rest(seen, self._slurm.names)


def cluster_storm(
    slurm: Cluster, seed: int, steps: int, every_s: float, pace_s: float, note: Callable[[str], None]
) -> Storm:
    """A storm whose runs are jobs."""
    out = slurm.shared / "storm"
    weather = Weather(slurm, out / "work" / "run.toml", out / "run", seed)
    return Storm(out, Jobs(slurm), seed, steps, every_s, note, weather.strike, weather.rest, pace_s, RESTARTS)

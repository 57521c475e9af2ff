"""Start the engines of a Slurm job: one step with a task on each of their nodes, and a step for each further start."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.engine_launcher import Environment
from slurm_rlhf.nodes.engine_node import end_file, ended_file
from slurm_rlhf.nodes.slurm_run import SlurmRun
from slurm_rlhf.nodes.srun import RunningStep, role_step
from slurm_rlhf.nodes.step_spec import StepSpec
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.replacement import with_engine_on
from slurm_rlhf.placement.topology import Topology
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

_ATTEMPTS = 5
"""Starts of a step that failed for a reason which may be gone the next time."""


@dataclass(slots=True)
class _Start:
    """Is one step, with the engines that it has started."""

    run_id: str
    step: RunningStep
    node_of: dict[int, str]  # engine -> node
    told: dict[int, str] = field(default_factory=dict)  # engine -> how it ended
    attempts: int = 1

    def look(self, run_dir: Path) -> dict[int, str]:
        """Return the engines that have ended since the last look, and how."""
        news = {}
        for engine in self.node_of.keys() - self.told.keys():
            with contextlib.suppress(OSError):  # there is none, or its file system does not answer this look
                news[engine] = ended_file(run_dir, self.run_id, engine).read_text(encoding="utf-8")
        if not self.told and not news and self._started_again():
            return {}
        left = {engine: node for engine, node in self.node_of.items() if engine not in {*self.told, *news}}
        if left and (self.step.code is not None or self.step.failures()):
            ended = {node: how for nodes, how in self.step.failures() for node in _names(nodes)}
            for engine, node in left.items():
                if node in ended:
                    news[engine] = f"its step on {node} {ended[node]}; see {self.step.log}"
                elif self.step.code is not None:
                    news[engine] = f"the step on {node} is over; see {self.step.log}"
        self.told.update(news)
        return news

    def _started_again(self) -> bool:
        """Start the step once more, if srun did not come so far as to start an engine, and may another time."""
        if self.step.code is None or self.attempts == _ATTEMPTS or not self.step.worth_another_try():
            return False
        self.attempts += 1
        self.step.start()
        return True


class SlurmEngines:
    """Implements `EngineLauncher` in a Slurm allocation; a node that is lost costs its own engines."""

    def __init__(self, run: SlurmRun, ranks: RankMap) -> None:
        """Raise PlacementError if this process cannot reach the nodes."""
        self.unfit = run.unfit
        self._run = run
        self._ranks = ranks
        self._arguments: list[str] = []
        self._environment: Environment = {}
        self._starts: list[_Start] = []  # every one so far
        self._ended: set[tuple[str, int]] = set()  # (run_id, engine) that were told to end
        self._news: dict[int, str] = {}  # engine -> how it ended, where `ended` has not returned it yet
        self._lock = threading.Lock()
        self._stopping = False
        self.address = address_among(ranks.used_nodes, run.slurm.node_name)

    @property
    def spares(self) -> list[str]:
        used = set(self._ranks.used_nodes)
        return [node for node in self._run.slurm.job_nodes if node not in used]

    def start(self, arguments: list[str], environment: Environment) -> None:
        self._arguments, self._environment = arguments, environment
        for pattern in ("ended.*", "end.*"):
            for old in self._run.control.glob(pattern):
                old.unlink(missing_ok=True)
        self._run.write_map(self._ranks)
        with self._lock:  # another thread may look for ends already
            self._start(self._run.run_id, ROLLOUT, self._ranks.engine_nodes, None)

    def _start(self, run_id: str, name: str, node_of: dict[int, str], only: Sequence[int] | None) -> None:
        run, engines = self._run, None if only is None else list(only)
        spec = StepSpec(ROLLOUT, str(run.run_dir), run_id, self._arguments, self._environment, engines=engines)
        file = run.control / f"{name}.json"
        spec.write(file)
        nodes = None if only is None else list(dict.fromkeys(node_of.values()))
        step = role_step(self._ranks, ROLLOUT, run.logs, run.container, nodes)
        running = run.running(step, run.logs / f"{name}.srun.log", "engine_node", str(file))
        self._starts.append(_Start(run_id, running, node_of))
        running.start()

    def place_others(self, ranks: RankMap) -> None:
        """Note where the other roles are from now on, for the run directory and for `spares`."""
        with self._lock:
            own = {share.node: self._ranks.topology.node(share.node) for share in self._ranks.roles[ROLLOUT]}
            known = {node.name for node in ranks.topology.nodes}
            nodes = (*ranks.topology.nodes, *(node for name, node in own.items() if name not in known))
            topology = Topology(nodes, ranks.topology.accelerator, ranks.topology.origin)
            self._ranks = RankMap(topology, {**ranks.roles, ROLLOUT: self._ranks.roles[ROLLOUT]})
            self._run.write_map(self._ranks)

    def ended(self) -> list[tuple[int, str]]:
        with self._lock:
            self._look()
            news, self._news = self._news, {}
            return sorted(news.items())

    def _look(self) -> None:
        for start in self._starts if not self._stopping else ():
            for engine, how in start.look(self._run.run_dir).items():
                if (start.run_id, engine) not in self._ended:
                    self._news[engine] = how

    def _last_start(self, engine: int) -> _Start:
        return next(start for start in reversed(self._starts) if engine in start.node_of)

    def end(self, engine: int) -> None:
        with self._lock:
            start = self._last_start(engine)
            self._ended.add((start.run_id, engine))
            self._news.pop(engine, None)
            if engine not in start.told:
                end_file(self._run.run_dir, start.run_id, engine).touch()

    def gone(self, engine: int) -> bool:
        with self._lock:
            self._look()
            return engine in self._last_start(engine).told

    def start_again(self, engine: int, node: str) -> None:
        with self._lock:
            if self._stopping:
                return
            home = self._last_start(engine).node_of[engine]
            if node != home:
                self._ranks = with_engine_on(self._ranks, ROLLOUT, engine, node)
                self._environment = {**self._environment, node: self._environment.get(node, self._environment[home])}
                self._run.write_map(self._ranks)
            number = sum(engine in start.node_of for start in self._starts)
            name = f"{ROLLOUT}.engine{engine}"
            self._start(f"{self._run.run_id}.e{engine}.{number}", name, {engine: node}, [engine])

    def stop(self, done: bool, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
        if done:
            self._wait_gone(grace_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.signal(number)
            self._wait_gone(timeouts.STEP_KILL_S)

    def signal(self, number: signal.Signals) -> None:
        """Signal every step, as part of the end of the whole job."""
        with self._lock:
            self._stopping = True
        for start in self._starts:
            start.step.signal(number)

    @property
    def running(self) -> bool:
        """Tell whether a step is left."""
        return any(start.step.code is None for start in self._starts)

    def _wait_gone(self, seconds: float) -> None:
        wait_until(lambda: not self.running, seconds, 0.05, 0.05)


def _names(nodes: str) -> list[str]:
    """List the nodes that srun named; empty where it wrote something else."""
    try:
        return expand(nodes)
    except PlacementError:
        return []

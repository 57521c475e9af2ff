"""Start the roles in a Slurm allocation: one `srun` step per role, one torchrun on each of its nodes.

Engines are children of their step's tasks, without a torchrun: `slurm_engines`.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.node_look import arguments
from slurm_rlhf.nodes.slurm_engines import SlurmEngines
from slurm_rlhf.nodes.slurm_run import SlurmRun
from slurm_rlhf.nodes.srun import RunningStep, Step, look_step, role_step
from slurm_rlhf.nodes.step_spec import StepSpec
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

_ATTEMPTS = 5


@dataclass(slots=True)
class _Role:
    spec: StepSpec
    file: Path
    step: RunningStep
    attempt: int = 0
    reported: int = 0  # number of its failures that were reported
    ending: bool = False  # was told to end, before it is started again


class SlurmLauncher:
    """Implement `nodes.launcher.Launcher` inside `sbatch` and `salloc`.

    The exit of srun proves nothing: if the only node of a role dies, srun returns 0; if one of several dies, it does
    not return before SlurmdTimeout. A task that srun reports as failed has failed; only the ranks can report success.
    """

    fixed = ""

    def __init__(self, run: SlurmRun, ranks: RankMap) -> None:
        """Raise PlacementError if this process cannot reach the nodes."""
        self.unfit = run.unfit
        self._run = run
        self._ranks = ranks
        self._roles: list[_Role] = []
        self._written = False  # the rank map, into the run directory
        self._stopping = False
        self._lock = threading.Lock()
        self.engines: SlurmEngines | None = None
        self.address = address_among(ranks.used_nodes, run.slurm.node_name)

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        if ROLES[role].kind == "engine":
            self.engines = SlurmEngines(self._run, self._ranks)
            self.engines.start(arguments, environment)
            return
        if not self._written:
            self._written = True
            if self.engines is not None:
                self.engines.place_others(self._ranks)
            else:
                self._run.write_map(self._ranks)
        step = role_step(self._ranks, role, self._run.logs, self._run.container)
        spec = StepSpec(role, str(self._run.run_dir), self._run.run_id, arguments, environment, self._meeting(step))
        file = self._run.control / f"{role}.json"
        item = _Role(spec, file, self._run.running(step, self._run.logs / f"{role}.srun.log", "node", str(file)))
        spec.write(file)
        with self._lock:
            self._roles.append(item)
            item.step.start()

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        with self._lock:
            ended = [item for item in self._roles if item.spec.role in roles]
            self._roles = [item for item in self._roles if item.spec.role not in roles]
            self._ranks, self._written = ranks, False
        if ROLLOUT in roles and self.engines is not None:
            self.engines.stop(False, 0.0)
            self.engines = None
        # SIGTERM makes srun kill its tasks; where a node does not answer, it would wait for SlurmdTimeout.
        for number in (signal.SIGTERM, signal.SIGKILL):
            for item in ended:
                item.step.signal(number)
            wait_until(lambda: not any(item.step.code is None for item in ended), timeouts.STEP_KILL_S, 0.05, 0.05)

    def ended(self) -> list[Ended]:
        news: list[Ended] = []
        with self._lock:
            for item in self._roles:
                fresh = item.step.failures()[item.reported :]
                if not fresh or (item.reported == 0 and self._started_again(item)):
                    continue
                item.reported += len(fresh)
                news += [Ended(item.spec.role, node, how, item.step.log) for node, how in fresh]
        return news

    def stopped(self) -> list[tuple[str, int]]:
        return []  # they are children of others

    def look(self, pids: Mapping[str, Sequence[int]], directory: Path, within_s: float) -> None:
        step = look_step(self._ranks, list(pids), self._run.container)
        log, words = directory / "look.srun.log", [str(directory), *arguments(pids)]
        running = self._run.running(step, log, "node_look", *words)
        running.start()
        wait_until(lambda: running.code is not None, within_s, 0.05, 0.2)
        running.signal(signal.SIGTERM)
        if running.log.exists() and running.log.stat().st_size == 0:
            running.log.unlink()

    def unreached(self, nodes: Sequence[str]) -> list[str]:
        running = RunningStep(look_step(self._ranks, nodes), ["true"], self._run.logs / "unreached.srun.log")
        running.start()
        wait_until(lambda: running.code is not None, timeouts.NODE_REACHED_S, 0.05, 0.2)
        running.signal(signal.SIGTERM)
        return running.unreached()

    def stop(self, done: bool, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
        if done:
            self._wait_gone(grace_s)
        self._signal(signal.SIGTERM)
        self._wait_gone(timeouts.STEP_KILL_S)
        # The steps that are left have a node that does not answer. Their tasks on other nodes got the signal, and the
        # end of the batch step ends the rest; srun itself would wait for SlurmdTimeout.
        self._signal(signal.SIGKILL)
        self._wait_gone(timeouts.STEP_KILL_S)

    def _started_again(self, item: _Role) -> bool:
        """Start a role once more; return whether it will run. Its failed step may still be ending."""
        if self._stopping or item.attempt + 1 == _ATTEMPTS or not item.step.worth_another_try():
            return False
        if item.step.code is None:
            if not item.ending:
                item.ending = True
                item.step.signal(signal.SIGTERM)
            return True
        item.attempt += 1
        item.ending = False
        item.spec = replace(item.spec, meeting=self._meeting(item.step.step))
        item.spec.write(item.file)
        item.step.start()
        return True

    def _meeting(self, step: Step) -> str:
        """Make the file where the torchruns of a step find each other, and name it; empty: they need not."""
        if not step.together or len(step.nodes) == 1:
            return ""
        name = f"{step.name}.{secrets.token_hex(4)}.port"
        (self._run.control / name).touch()  # NFS looks for news in a file that is there, and not for one that is not
        return name

    def _signal(self, number: signal.Signals) -> None:
        for item in self._roles:
            item.step.signal(number)
        if self.engines is not None:
            self.engines.signal(number)

    def _running(self) -> bool:
        engines = self.engines is not None and self.engines.running
        return engines or any(item.step.code is None for item in self._roles)

    def _wait_gone(self, seconds: float) -> None:
        wait_until(lambda: not self._running(), seconds, 0.05, 0.05)

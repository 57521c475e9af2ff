"""Start the engines of a job, each for itself: as children here, under Slurm as one step with a task on each node."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.launch.engine_node import ended_file
from slurm_rlhf.launch.engine_ranks import LOOPBACK, EngineRanks, plain_environment
from slurm_rlhf.launch.node import RANK_MAP, visible_gpus, without_gpu_choice
from slurm_rlhf.launch.slurm import role_step, used_nodes
from slurm_rlhf.launch.srun import HOST, Container, RunningStep
from slurm_rlhf.launch.step_spec import StepSpec
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.polling import wait_until

_KILL_S = 3.0

Environment = Mapping[str, Mapping[str, str]]
"""Node -> variables of its ranks."""


class EngineLauncher(Protocol):
    """Starts the engines of one rank map. Made by the command line, used by the thread that leads the job."""

    @property
    def address(self) -> str:
        """Return the address of this process for the engines; loopback if all are on this machine."""

    def start(self, arguments: list[str], environment: Environment) -> None:
        """Start all engines, whose ranks get `arguments`; it does not wait for them. Called once."""

    def ended(self) -> list[tuple[int, str]]:
        """Return (engine, how) of the engines that ended since the last call. Does not block."""

    def stop(self, done: bool, grace_s: float) -> None:
        """End every engine and wait until it is gone; `done`: all are leaving, and get `grace_s` seconds for it."""


class LocalEngines:
    """Implements `EngineLauncher` on this machine."""

    def __init__(self, run_dir: Path, ranks: RankMap) -> None:
        self._run_dir = run_dir
        self._ranks = ranks
        self._engines: EngineRanks | None = None

    @property
    def address(self) -> str:
        return LOOPBACK

    def start(self, arguments: list[str], environment: Environment) -> None:
        share = self._ranks.roles[ROLLOUT][0]
        # The devices in the rank map are those that CUDA_VISIBLE_DEVICES gave this process; there is no step to ask.
        gpus = visible_gpus(self._ranks.topology, share.node, share.gpus, {})
        variables = without_gpu_choice(plain_environment({**environment[share.node], **gpus}))
        self._engines = EngineRanks(self._run_dir, self._ranks, share.node, arguments, variables)
        self._engines.start()

    def ended(self) -> list[tuple[int, str]]:
        return self._engines.ended() if self._engines else []

    def stop(self, done: bool, grace_s: float) -> None:
        engines = self._engines
        if engines is None:
            return
        if done:
            wait_until(lambda: not engines.running, grace_s, 0.02, 0.02)
        engines.kill()


class SlurmEngines:
    """Implements `EngineLauncher` in a Slurm allocation; a node that is lost costs its own engines."""

    def __init__(self, run_dir: Path, ranks: RankMap, slurm: SlurmEnvironment, container: Container = HOST) -> None:
        """Raise PlacementError if this process cannot reach the nodes."""
        self._run_dir = run_dir
        self._ranks = ranks
        self._container = container
        self._run_id = f"{slurm.job_id}.{slurm.restart_count}.{secrets.token_hex(4)}"
        self._step: RunningStep | None = None
        self._told: set[int] = set()
        elsewhere = [node for node in used_nodes(ranks) if node != slurm.node_name]
        self._address = address_towards(elsewhere[0]) if elsewhere else LOOPBACK

    @property
    def address(self) -> str:
        return self._address

    def start(self, arguments: list[str], environment: Environment) -> None:
        text = json.dumps(self._ranks.to_json(), indent=1) + "\n"
        (self._run_dir / RANK_MAP).write_text(text, encoding="utf-8")
        for old in (self._run_dir / ".control").glob("ended.*"):
            old.unlink(missing_ok=True)
        spec = StepSpec(ROLLOUT, str(self._run_dir), self._run_id, arguments, environment)
        file = self._run_dir / ".control" / f"{ROLLOUT}.json"
        spec.write(file)
        gpus = self._ranks.topology.accelerator == GPU
        command = self._container.command("slurm_rlhf.launch.engine_node", str(file), gpus=gpus)
        logs = self._run_dir / "logs"
        step = role_step(self._ranks, ROLLOUT, logs, self._container)
        self._step = RunningStep(step, command, logs / f"{ROLLOUT}.srun.log")
        self._step.start()

    def ended(self) -> list[tuple[int, str]]:
        news = {}
        for group in self._ranks.tp_groups:
            file = ended_file(self._run_dir, self._run_id, group.engine)
            if group.engine not in self._told and file.exists():
                news[group.engine] = file.read_text(encoding="utf-8")
        if self._step is not None and self._step.code is not None:
            for group in self._ranks.tp_groups:
                if group.engine not in self._told:
                    news.setdefault(group.engine, f"the step on {group.node} is over; see {self._step.log}")
        self._told.update(news)
        return sorted(news.items())

    def stop(self, done: bool, grace_s: float) -> None:
        if done:
            self._wait_gone(grace_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._step is not None:
                self._step.signal(number)
            self._wait_gone(_KILL_S)

    def _wait_gone(self, seconds: float) -> None:
        wait_until(lambda: self._step is None or self._step.code is not None, seconds, 0.05, 0.05)

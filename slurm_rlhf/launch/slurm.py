"""A Slurm allocation: one `srun` step per role, one torchrun on each of its nodes."""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_rlhf.cluster.environment import SlurmEnvironment
from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.config.roles import ROLES, role_order
from slurm_rlhf.launch.container import HOST, Container
from slurm_rlhf.launch.launcher import Ended
from slurm_rlhf.launch.node import RANK_MAP
from slurm_rlhf.launch.ports import ATTEMPTS, ephemeral_start, meeting_port
from slurm_rlhf.launch.srun import Step
from slurm_rlhf.launch.step import RunningStep
from slurm_rlhf.launch.step_spec import StepOrder
from slurm_rlhf.placement.rank_map_file import RankMap
from slurm_rlhf.placement.topology import GPU

_KILL_S = 3.0


@dataclass(slots=True)
class _Role:
    order: StepOrder
    file: Path
    step: RunningStep
    attempt: int = 0
    reported: int = 0  # of its failures
    ending: bool = False  # told to end, before it is started again


class SlurmLauncher:
    """Implements `cluster.launcher.Launcher` inside `sbatch` and `salloc`.

    Neither that srun returns nor what it returns is trusted: if a role's only node dies it returns 0, if one of
    several does it does not return before SlurmdTimeout. What srun says of a task that failed is believed at once;
    that all is well is for the ranks to say.
    """

    def __init__(self, run_dir: Path, ranks: RankMap, slurm: SlurmEnvironment, container: Container = HOST) -> None:
        """Raises PlacementError where there is no way to the nodes from here."""
        self._run_dir = run_dir
        self._ranks = ranks
        self._slurm = slurm
        self._container = container
        self._run_id = f"{slurm.job_id}.{slurm.restart_count}.{secrets.token_hex(4)}"
        self._ephemeral = ephemeral_start()
        self._roles: list[_Role] = []
        self._stopping = False
        self._lock = threading.Lock()
        elsewhere = [node for node in used_nodes(ranks) if node != slurm.node_name]
        self._address = address_towards(elsewhere[0]) if elsewhere else "127.0.0.1"

    @property
    def address(self) -> str:
        return self._address

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        if not self._roles:
            text = json.dumps(self._ranks.to_json(), indent=1) + "\n"
            (self._run_dir / RANK_MAP).write_text(text, encoding="utf-8")
        step = role_step(self._ranks, role, self._run_dir / "logs", self._container)
        order = StepOrder(role, str(self._run_dir), self._run_id, arguments, environment, self._port(step, 0))
        file = self._run_dir / ".control" / f"{role}.json"
        gpus = self._ranks.topology.accelerator == GPU
        shim = self._container.command("slurm_rlhf.launch.node", str(file), gpus=gpus)
        item = _Role(order, file, RunningStep(step, shim, self._run_dir / "logs" / f"{role}.srun.log"))
        self._roles.append(item)
        order.write(file)
        item.step.start()

    def ended(self) -> list[Ended]:
        news: list[Ended] = []
        with self._lock:
            for item in self._roles:
                fresh = item.step.failures()[item.reported :]
                if not fresh or (item.reported == 0 and self._started_again(item)):
                    continue
                item.reported += len(fresh)
                news += [Ended(item.order.role, node, how, item.step.log) for node, how in fresh]
        return news

    def stop(self, done: bool, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
        if done:
            self._wait_gone(grace_s)
        self._signal(signal.SIGTERM)
        self._wait_gone(_KILL_S)
        # Left are steps with a node that does not answer. Their tasks elsewhere have had their signal, and the end of
        # the batch step ends what there may be; srun itself would wait for SlurmdTimeout.
        self._signal(signal.SIGKILL)
        self._wait_gone(_KILL_S)

    def _started_again(self, item: _Role) -> bool:
        """Give a role another attempt, at another port. True also while its failed step is still on its way out."""
        if self._stopping or item.attempt + 1 == ATTEMPTS or not item.step.worth_another_try():
            return False
        if item.step.code is None:
            if not item.ending:
                item.ending = True
                item.step.signal(signal.SIGTERM)
            return True
        item.attempt += 1
        item.ending = False
        item.order = replace(item.order, port=self._port(item.step.step, item.attempt))
        item.order.write(item.file)
        item.step.start()
        return True

    def _port(self, step: Step, attempt: int) -> int:
        """Where the step's torchruns meet; 0: they need not."""
        if not step.together or len(step.nodes) == 1:
            return 0
        number = role_order(step.name)[0]
        return meeting_port(self._slurm.job_id, self._slurm.restart_count, number, attempt, self._ephemeral)

    def _signal(self, number: signal.Signals) -> None:
        for item in self._roles:
            item.step.signal(number)

    def _wait_gone(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(item.step.code is None for item in self._roles) and time.monotonic() < end:
            time.sleep(0.05)


def used_nodes(ranks: RankMap) -> list[str]:
    """The nodes that hold a rank, in the topology's order."""
    used = {share.node for shares in ranks.roles.values() for share in shares}
    return [node.name for node in ranks.topology.nodes if node.name in used]


def role_step(ranks: RankMap, role: str, logs: Path, container: Container = HOST) -> Step:
    """The step of `role`.

    Engines never span nodes: the torchruns of rollout do not know of each other, and one that ends takes none along.
    """
    nodes = [ranks.topology.node(share.node) for share in ranks.roles[role]]
    has_gpus = ranks.topology.accelerator == GPU
    return Step(
        name=role,
        nodes=tuple(node.name for node in nodes),
        cpus=min(node.cpus for node in nodes),
        # All that the job has there, as the shim chooses and NCCL wants to see its neighbours.
        gpus=tuple(node.gpus for node in nodes) if has_gpus else (),
        output=str(logs / f"{role}.%N.torchrun.log"),
        together=ROLES[role].kind != "engine",
        uneven=len({node.gpus for node in ranks.topology.nodes}) > 1,
        options=container.step_options(),
    )

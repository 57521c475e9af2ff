"""Say what all steps of a run in a Slurm job share: its directory, the job, the container, the name of this start."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment
from slurm_rlhf.config.schema import Timeout
from slurm_rlhf.nodes.srun import AGENT, HOST, Container, RunningStep, Step
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import write_atomically

RANK_MAP = "rank_map.json"
"""In the run directory."""


@dataclass(frozen=True, slots=True)
class SlurmRun:
    """Describe a run in the job `slurm`."""

    run_dir: Path
    slurm: SlurmEnvironment
    container: Container = HOST
    unfit: Mapping[str, str] = field(default_factory=dict)  # node -> why no engine is to start there
    timeout: Timeout = field(default_factory=Timeout)
    token: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def run_id(self) -> str:
        """Return a name that no other start of the run has."""
        return f"{self.slurm.job_id}.{self.slurm.restart_count}.{self.token}"

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    def write_map(self, ranks: RankMap) -> None:
        """Let every process of the run find who is where."""
        write_atomically(self.run_dir / RANK_MAP, json.dumps(ranks.to_json(), indent=1) + "\n")

    def running(self, step: Step, log: Path) -> RunningStep:
        """Return a step whose tasks are agents; `log` is that of srun itself. It is not started yet."""
        command = self.container.command(AGENT, step.name, gpus=bool(step.gpus))  # `ps` shows whose agents they are
        return RunningStep(step, command, log)

"""summary.json: how the run ended, for people and for scripts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.observe.metrics import finite


@dataclass(slots=True)
class Summary:
    """`status` is running, finished, stopped, interrupted or failed."""

    status: str
    steps: int
    total_steps: int
    eval_before: float | None
    eval_after: float | None
    reward_first: float | None
    reward_last: float | None
    wall_s: float  # of all sessions of the run, start-up included
    tokens_per_s: float  # sampled tokens over wall_s
    policy_version: int
    world: dict[str, int]  # role -> ranks
    seed: int
    self_check: dict[str, float] = field(default_factory=dict)  # check -> figure, of the last start
    error: str = ""
    gpus: dict[str, Any] | None = None  # `roles.gpu_account.GpuAccount.summary`; without GPUs not written

    def write(self, path: Path) -> None:
        """Replace `path` atomically: whoever reads it, after a crash of the node too, sees a whole one."""
        fields = asdict(self)
        if self.gpus is None:
            del fields["gpus"]
        fields |= {name: finite(value) for name, value in fields.items() if isinstance(value, float)}
        fields["self_check"] = {name: finite(value) for name, value in self.self_check.items()}
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(fields, indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

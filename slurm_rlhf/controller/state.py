"""The conductor's part of a checkpoint: everything of the run that no role holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from slurm_rlhf.errors import CheckpointError


@dataclass(slots=True)
class RunState:
    """Where the run stands after `step` steps."""

    seed: int
    step: int = 0
    policy_version: int = 0  # of the weights that the engines hold
    responses: int = 0  # sampled so far, evaluation not counted
    response_tokens: int = 0
    wall_s: float = 0.0  # over all sessions of the run
    eval_before: float | None = None
    eval_after: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunState:
        """Raises CheckpointError when `data` was written by another version of this class."""
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            raise CheckpointError(
                f"the checkpoint's run state has {sorted(data)}, this version of slurm_rlhf needs {sorted(known)}; "
                "resume with the version that wrote it"
            )
        return cls(**data)

"""The checkpoints of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_rlhf.checkpoint import resume, save


class CheckpointDir:
    """`<run_dir>/checkpoints/step_000010/`: in it one directory per role, state.json and manifest.json.

    Only the conductor calls it; the roles write into the directory that `begin` returns. A save goes

        path = checkpoints.begin(step)      # then every role writes into path / <role> and closes its files
        checkpoints.commit(step, state)     # from here on it exists
        checkpoints.prune(max_num)
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.root = Path(run_dir) / "checkpoints"

    def begin(self, step: int) -> Path:
        """An empty directory to write into (see `save.begin`). Raises CheckpointError."""
        return save.begin(self.root, step)

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """The final path of a checkpoint that is now on disk (see `save.commit`). Raises CheckpointError, TypeError."""
        return save.commit(self.root, step, state)

    def prune(self, max_num: int) -> list[Path]:
        """Keep the newest `max_num` (see `save.prune`). Raises ConfigError, CheckpointError."""
        return save.prune(self.root, max_num)

    def latest(self) -> Path | None:
        """The newest whole checkpoint. All files are read, up to a size (see `manifest`): not for a hot loop."""
        return resume.latest(self.root)

    def resolve(self, resume_key: str) -> Path | None:
        """What `resume` in the configuration means (see `resume.resolve`). Raises CheckpointError."""
        return resume.resolve(self.root, resume_key)

    def load_state(self, path: Path) -> dict[str, Any]:
        """The state committed with a checkpoint, checked first (see `resume.load_state`). Raises CheckpointError."""
        return resume.load_state(path)

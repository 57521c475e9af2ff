"""Where everything of a run lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths below `run_dir`; see the README for what each holds."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def final(self) -> Path:
        return self.root / "final"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def keys(self) -> Path:
        return self.root / ".control" / "keys.json"

    @property
    def lock(self) -> Path:
        return self.root / ".control" / "lock"

    @property
    def restart_guard(self) -> Path:
        return self.root / ".control" / "restart_guard"

    def role_log(self, role: str, node: str, rank: int | str) -> Path:
        return self.logs / f"{role}.{node}.{rank}.log"

    def make(self) -> None:
        """Create the directories; only the owner can enter `.control`, which holds the keys."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.keys.parent.mkdir(mode=0o700, exist_ok=True)

"""Say where everything of a run lies, and write files that a reader sees whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final


class RunDirectory:
    """Name the paths below `run_dir`; `docs/first_run.md` says what each holds."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root
        self.config: Final = root / "config.toml"
        self.metrics: Final = root / "metrics.jsonl"
        self.samples: Final = root / "samples.jsonl"
        self.events: Final = root / "events.jsonl"
        self.timeline: Final = root / "timeline.jsonl"
        self.layout: Final = root / "layout.json"
        self.report: Final = root / "report.html"
        self.trace: Final = root / "trace.json"
        self.tensorboard: Final = root / "tensorboard"
        self.trackers: Final = root / "trackers"
        self.evaluations: Final = root / "eval"
        self.logs: Final = root / "logs"
        self.reward_log: Final = self.logs / "reward.log"
        self.checkpoints: Final = root / "checkpoints"
        self.final: Final = root / "final"
        self.summary: Final = root / "summary.json"
        self.keys: Final = root / ".control" / "keys.json"
        self.lock: Final = root / ".control" / "lock"
        self.restart_guard: Final = root / ".control" / "restart_guard"

    def role_log(self, role: str, node: str, rank: int | str) -> Path:
        return self.logs / f"{role}.{node}.{rank}.log"

    def hang(self, step: int, number: int) -> Path:
        """Name the directory of the report number `number` (from 1) about a hang in `step`."""
        return self.root / (f"hang-{step}" if number == 1 else f"hang-{step}.{number}")

    def aside(self, path: Path, number: int) -> Path:
        """Name the place of an earlier start's `path`: metrics.1.jsonl for metrics.jsonl."""
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    def make(self) -> None:
        """Create the directories; only the owner can enter `.control`, which holds the keys.

        Raises PermissionError where `.control` is somebody else's, a link, or open to others: what a run reads there
        tells its processes what to do.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        control = self.keys.parent
        control.mkdir(mode=0o700, exist_ok=True)
        found = control.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return
        raise PermissionError(
            errno.EPERM,
            f"{control} belongs to user {found.st_uid} and has mode {stat.filemode(found.st_mode)}; it has to be a "
            f"directory of user {os.geteuid()} that nobody else can enter (chmod 700, where it is yours), because the "
            "keys of the run are there",
        )


def write_atomically(
    path: Path, text: str | Iterable[str], *, durable: bool = False, private: bool = False, errors: str = "strict"
) -> None:
    """Replace `path` by a file with `text`, one piece or many, in one step. Raises OSError; an earlier file stays then.

    `durable`: the file outlives a crash of the node. `private`: only the owner can read it, at any moment.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    # O_EXCL: never through somebody's link.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors=errors) as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.writelines([text] if isinstance(text, str) else text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

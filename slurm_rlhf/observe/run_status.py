"""Write summary.json, and read from it and from metrics.jsonl how far a run is."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slurm_rlhf.observe.log_tail import read_end
from slurm_rlhf.observe.metrics import finite
from slurm_rlhf.observe.run_log import read_object, whole_lines
from slurm_rlhf.run_directory import write_atomically


@dataclass(slots=True)
class Summary:
    """Describe how a run went; `status` is running, finished, stopped, interrupted or failed."""

    status: str
    steps: int
    total_steps: int
    eval_before: float | None
    eval_after: float | None
    reward_first: float | None
    reward_last: float | None
    wall_s: float  # seconds of all starts of the run together, loading included
    tokens_per_s: float  # sampled tokens / wall_s
    policy_version: int
    world: dict[str, int]  # role -> ranks
    seed: int
    self_check: dict[str, float] = field(default_factory=dict)  # name of a check -> figure, from the last start
    error: str = ""
    starting: str = ""  # the last message while the run starts; empty once the steps have begun
    gpus: dict[str, Any] | None = None  # `GpuAccount.summary`; None without GPUs
    phases: dict[str, Any] = field(default_factory=dict)  # phase -> seconds, predicted and measured
    best: dict[str, Any] | None = None  # metric, value, step, checkpoint; None without ckpt.best_metric
    restarts: list[str] = field(default_factory=list)  # why roles were restarted in place, since the last start

    @classmethod
    def read(cls, path: Path) -> Summary:
        """Read what a run has written; ignore fields that this version does not know."""
        known, found = {one.name for one in fields(cls)}, json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: value for name, value in found.items() if name in known})

    def write(self, path: Path) -> None:
        """Replace `path` atomically, so that readers always find a whole file, also after a crash of the node."""
        content = asdict(self)
        for name in ("gpus", "phases", "best", "starting", "restarts"):
            if not content[name]:
                del content[name]
        content |= {name: finite(value) for name, value in content.items() if isinstance(value, float)}
        content["self_check"] = {name: finite(value) for name, value in self.self_check.items()}
        write_summary(path, content)


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` by `content`; on a full disk only with the first line of its `error`. Raises OSError."""
    try:
        write_atomically(path, json.dumps(content, indent=2) + "\n", durable=True)
    except OSError:
        # There is no space for a second file, but the blocks of the existing one can hold a short text.
        short = {**content, "error": str(content.get("error", "")).partition("\n")[0]}
        text = (json.dumps(short, indent=2) + "\n").encode()
        if len(text) > path.stat().st_blocks * 512:
            raise
        with path.open("r+b") as file:
            file.write(text)
            file.truncate()


_READ = 1 << 20  # bytes from the end of metrics.jsonl
_WINDOW = 20  # steps that the estimate looks back


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Say how far a run is."""

    status: str  # as in `Summary`; empty if there is no summary.json
    step: int
    total: int
    step_s: float | None  # mean seconds of the last steps
    age_s: float | None  # seconds since the last step
    error: str
    starting: str  # the last message of a start that has not reached its first step
    starting_s: float  # seconds since that message
    restarts: tuple[str, ...]  # restarts in place since the last start of the run
    rows: list[dict[str, Any]]  # the last lines of metrics.jsonl

    @property
    def reward(self) -> float | None:
        """Return the reward of the last step."""
        return self.rows[-1].get("reward") if self.rows else None

    @property
    def left_s(self) -> float | None:
        """Estimate the seconds that the remaining steps take; None while nothing is known."""
        return None if self.step_s is None else (self.total - self.step) * self.step_s


def read_run_status(metrics: Path, summary: Path) -> RunStatus:
    """Read the two files; a file that is missing or half written counts as empty."""
    ended, rows = read_object(summary), _last_rows(metrics)
    seconds = [row["time/step"] for row in rows if row.get("time/step") is not None][-_WINDOW:]
    return RunStatus(
        status=str(ended.get("status", "")),
        step=max(int(rows[-1]["step"]) if rows else 0, int(ended.get("steps", 0))),
        total=int(ended.get("total_steps", 0)),
        step_s=sum(seconds) / len(seconds) if seconds else None,
        age_s=max(0.0, time.time() - metrics.stat().st_mtime) if rows else None,
        error=str(ended.get("error", "")),
        starting=str(ended.get("starting", "")),
        starting_s=max(0.0, time.time() - summary.stat().st_mtime) if ended.get("starting") else 0.0,
        restarts=tuple(map(str, ended.get("restarts", ()))),
        rows=rows,
    )


def _last_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [row for _, row in whole_lines(read_end(path, most=_READ))]
    except OSError:
        return []

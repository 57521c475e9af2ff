"""Allocations in a row that ended before a single step: a job that goes on by itself would then go on for ever."""

from __future__ import annotations

from pathlib import Path

from slurm_rlhf.errors import ConfigError

MOST = 5


def refuse_standstill(file: Path, moved: bool, lead_s: float) -> None:
    """Count this allocation in `file`; `moved`: it saw a step. Raises ConfigError when `MOST` in a row have not."""
    if moved:
        file.unlink(missing_ok=True)
        return
    count = 1 + (int(file.read_text(encoding="utf-8")) if file.exists() else 0)
    if count < MOST:
        file.write_text(str(count), encoding="utf-8")
        return
    file.unlink()
    raise ConfigError(
        f"{count} times in a row this run was told to stop before it had done a single step, so it does not requeue "
        f"itself once more: ask for more time (--time), or let it stop later (slurm.signal_lead_s = {lead_s:g}, and "
        "--signal=B:USR1@SECONDS in the batch script). Checkpoints are intact."
    )

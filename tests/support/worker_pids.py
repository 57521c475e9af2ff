"""The processes of a pool of workers."""

from __future__ import annotations

from typing import Any


def pids_of(pool: Any) -> list[int]:
    """List the processes of the workers that run here."""
    return [worker.process.pid for worker in pool._workers if worker.process is not None]

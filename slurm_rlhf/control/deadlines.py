"""The one table of deadlines: which time-out of the configuration a method has."""

from __future__ import annotations

from slurm_rlhf.config.schema_timeout import Timeout
from slurm_rlhf.errors import RunError

DEADLINES: dict[str, str] = {
    "start": "start",
    "generate": "generate",
    "logprobs": "forward",
    "self_check": "forward",
    "values": "forward",
    "score": "forward",
    "train_step": "train_step",
    "sync_listen": "sync",
    "sync_join": "sync",
    "sync_push": "sync",
    "sync_receive": "sync",
    "sleep": "sync",
    "wake_up": "sync",
    "save": "checkpoint",
    "load": "checkpoint",
    "export": "checkpoint",
    "about": "forward",  # behind whatever the rank is at
    "shutdown": "shutdown",
}
"""Method of a role -> field of `config.schema.Timeout`."""


def deadline(timeout: Timeout, method: str) -> float:
    """Seconds `method` may take. Raises RunError for a method that is not in the table."""
    if method not in DEADLINES:
        raise RunError(f"method {method!r} has no deadline; methods with one: {', '.join(sorted(DEADLINES))}")
    seconds: float = getattr(timeout, DEADLINES[method])
    return seconds

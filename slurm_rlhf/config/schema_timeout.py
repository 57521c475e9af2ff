"""The group `timeout` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timeout:
    """The one table of time-outs, in seconds."""

    connect: float = 600.0
    """From the start of a role's process to its first message: until its libraries are imported."""
    start: float = 1800.0
    """Loading the model, starting the engine."""
    generate: float = 3600.0
    """Silence of an engine that has requests: no finished response within this time."""
    forward: float = 1800.0
    """Log-probs, values or a reward model's scores of one batch."""
    train_step: float = 3600.0
    """One optimizer step."""
    collective: float = 1800.0
    """Any collective inside a role (training groups)."""
    sync: float = 600.0
    """One weight update, half of it for a single operation; with train.colocate_all, making room for another role."""
    sync_silence: float = 15.0
    """During a weight update: without a sign of life from a member, whatever it is waiting for, its link is cut."""
    checkpoint: float = 3600.0
    """Saving or loading one role's state."""
    reward: float = 600.0
    """One call of the reward function."""
    heartbeat_interval: float = 1.0
    """Between a rank's heartbeats."""
    heartbeat: float = 20.0
    """Silence after which a rank is lost."""
    shutdown: float = 8.0
    """From the request to leave to SIGTERM, and again to SIGKILL (half each)."""

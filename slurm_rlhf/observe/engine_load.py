"""What an engine did while it had requests."""

from __future__ import annotations

from slurm_rlhf.records import EngineLoad

__all__ = ["EngineLoad"]

"""Environment variables that a process of a run inherits from the one that started it."""

from __future__ import annotations

STORE_FD = "SLURM_RLHF_STORE_FD"
"""The number of the socket on which the first rank of a role opens the role's store."""

KEYS = "SLURM_RLHF_RUN_KEYS"
"""The run's keys, where they are handed over and not read from the run directory."""

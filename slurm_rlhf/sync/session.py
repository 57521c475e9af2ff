"""From a configuration and the conductor's word to a member that is ready to update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.sync.group import Membership, SyncGroup, join
from slurm_rlhf.sync.plan import SyncPlan, make_plan
from slurm_rlhf.sync.push import Sender
from slurm_rlhf.sync.receive import Receiver

Described = Sequence[Sequence[Any]]
"""[[name, shape, dtype], ...] in layer order."""


def join_as_sender(config: Config, label: str, parameters: Described, **group: Any) -> Sender:
    """An actor rank of the group that the conductor describes, see `Membership`. Raises SyncError, ConfigError."""
    joined, plan = _join(config, label, parameters, group)
    return Sender(joined, plan)


def join_as_receiver(config: Config, label: str, parameters: Described, expected: Described, **group: Any) -> Receiver:
    """An engine rank, which is able to load `expected`. Raises as `join_as_sender` does."""
    joined, plan = _join(config, label, parameters, group)
    return Receiver(joined, plan, expected)


def _join(config: Config, label: str, parameters: Described, group: dict[str, Any]) -> tuple[SyncGroup, SyncPlan]:
    sync = config.sync
    settings = {"timeout_s": config.timeout.sync, "backend": sync.backend, "interface": sync.interface}
    joined = join(Membership(label=label, **{**settings, **group}))
    return joined, make_plan(parameters, sync.bucket_mb << 20, joined.layout(config.ds.zero_stage))

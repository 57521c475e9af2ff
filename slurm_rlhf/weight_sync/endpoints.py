"""The two ends of a run's weight transfers: groups that come and go, and updates that may break and be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import SyncBroken
from slurm_rlhf.weight_sync.group import SyncGroup, join
from slurm_rlhf.weight_sync.member import Membership
from slurm_rlhf.weight_sync.plan import SyncPlan, make_plan
from slurm_rlhf.weight_sync.receiver import Receiver
from slurm_rlhf.weight_sync.sender import Held, Sender
from slurm_rlhf.weight_sync.store import SyncStore

Described = Sequence[Sequence[Any]]
"""[[name, shape, dtype], ...] in layer order."""

_OPERATION = 0.5
"""An operation's share of timeout.sync: members have to find out who is behind before the conductor gives up on all."""


class ActorEnd:
    """An actor rank's."""

    def __init__(self, config: Config, label: str) -> None:
        self._config = config
        self._label = label
        self._sender: Sender | None = None

    def listen(self, host: str) -> dict[str, Any]:
        """Open the store where the members of all groups meet. Raises SyncError."""
        self._store = SyncStore.listen(host, self._config.timeout.sync)
        return {"host": self._store.host, "port": self._store.port}

    def join(self, parameters: Described, **group: Any) -> dict[str, Any]:
        """Leave the group there was and join the one that `group` describes, in `Membership`'s words.

        Returns how this rank is connected. Raises SyncError, ConfigError.
        """
        if self._sender is not None:
            self._sender.group.close()
        joined, plan = _join(self._config, self._label, parameters, group)
        self._sender = Sender(joined, plan, self._config.sync.compare)
        return _connection(joined)

    def push(self, held: Held, version: int) -> dict[str, Any]:
        """Send this rank's share as policy `version`: statistics, or {"broken": why} where a new group may help.

        Raises SyncError for everything else.
        """
        assert self._sender is not None
        try:
            return asdict(self._sender.push(held, version))
        except SyncBroken as broken:
            return {"broken": str(broken)}


class EngineEnd:
    """An engine rank's."""

    def __init__(self, config: Config, label: str) -> None:
        self._config = config
        self._label = label
        self._receiver: Receiver | None = None

    def join(self, parameters: Described, expected: Described, **group: Any) -> dict[str, Any]:
        """As `ActorEnd.join`; the engine is able to load `expected`."""
        if self._receiver is not None:
            self._receiver.group.close()
        joined, plan = _join(self._config, self._label, parameters, group)
        self._receiver = Receiver(joined, plan, expected, self._config.sync.compare)
        return _connection(joined)

    def receive(self, version: int, load: Callable[[Iterator[tuple[str, Tensor]], int], None]) -> dict[str, Any]:
        """Hand policy `version` to `load(weights, version)`. Returns and raises as `ActorEnd.push` does."""
        assert self._receiver is not None
        try:
            with self._receiver.update(version) as weights:
                load(weights, version)
        except SyncBroken as broken:
            return {"broken": str(broken)}
        return {"checksum_s": self._receiver.verify_s}


def _join(config: Config, label: str, parameters: Described, group: dict[str, Any]) -> tuple[SyncGroup, SyncPlan]:
    sync = config.sync
    settings = {
        "timeout_s": _OPERATION * config.timeout.sync,
        "silence_s": config.timeout.sync_silence,
        "backend": sync.backend,
        "interface": sync.interface,
        "directory": str(Path(config.run_dir) / "sync"),
        "colocated": config.train.colocate_all,
        "whole": config.ds.zero_stage < 3,
    }
    joined = join(Membership(label=label, **{**settings, **group}))
    nbytes = sync.bucket_size_mb(joined.on_gpus) << 20
    return joined, make_plan(parameters, nbytes, joined.layout(config.ds.zero_stage))


def _connection(group: SyncGroup) -> dict[str, Any]:
    me = group.me
    return {"backend": group.backend, "interface": me.interface, "address": me.address, "node": me.node}

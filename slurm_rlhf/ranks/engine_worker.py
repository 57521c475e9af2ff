"""The base class of an engine's ranks, and what its leader and its followers do at their start."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine.engine import Engine, backend
from slurm_rlhf.engine.tp_engine import EnginePlace
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import SyncConnection, SyncReport
from slurm_rlhf.weights.receiver import EngineEnd
from slurm_rlhf.wire.calls import SyncGroupRequest
from slurm_rlhf.wire.client import ControlClient

LEADER_ADDRESS = "leader_address"
"""Key of the engine's store; its value: where the leader listens, and the name of its shared memory."""


class EngineWorker(Worker):
    """Works as a TP rank of an engine. `prepare_process` comes before it is made."""

    engine: Engine

    def __init__(self, config: Config, info: RankInfo, client: ControlClient) -> None:
        super().__init__(config, info, client)
        self.place = EnginePlace.of(info.rank, config.vllm.tensor_parallel_size, info.node)
        self.sync = EngineEnd(config, f"{info.role} {info.rank}")

    def join_group(self, request: SyncGroupRequest) -> SyncConnection:
        """Join a weight transfer group as the rank that `request` names."""
        return self.sync.join(request.parameters, self.engine.describe(), **request.described())

    def receive_weights(self, version: int) -> SyncReport:
        """Take over policy `version`; requests in flight go on under it."""
        return self.sync.receive(version, self.engine.load)

    def close(self) -> None:
        if hasattr(self, "engine"):
            with _without_collecting():
                self.engine.close()


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Switch off `gc.collect`: libraries collect all garbage while they end, and the process ends right after it."""
    collect, gc.collect = gc.collect, lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


def prepare_process(config: Config, info: RankInfo) -> None:
    """Set what the engine's library reads when it is imported: GPUs and environment variables; then import it."""
    own_devices(info.local_rank, config.vllm.tensor_parallel_size)
    backend(config).prepare_environment()
    backend(config).import_library()


def own_devices(local_rank: int, tp: int) -> None:
    """Leave only the GPUs of this engine visible, that of TP rank i as the i-th; before CUDA is initialized."""
    first = local_rank - local_rank % tp
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = [device for device in os.environ.get(name, "").split(",") if device]
        if visible:
            os.environ[name] = ",".join(visible[first : first + tp])


def segment_prefix(config: Config, place: EnginePlace) -> str:
    """Return how the names of the engine's shared memory begin, the same for all runs in one run directory."""
    run = hashlib.blake2b(str(Path(config.run_dir).absolute()).encode(), digest_size=8).hexdigest()
    return f"slurm_rlhf.{run}.{place.engine}."


def publish_address(store: Any, config: Config, place: EnginePlace, path: str) -> str:
    """Leader: publish where it listens; remove shared memory of earlier starts and return its new name."""
    from slurm_rlhf.engine.tp_engine import unlink_segments

    prefix = segment_prefix(config, place)
    unlink_segments(prefix)
    identity = prefix + secrets.token_hex(8)
    store.set(LEADER_ADDRESS, json.dumps([path, identity]))
    return identity


def read_address(store: Any, timeout_s: float) -> tuple[str, str]:
    """Follower: wait for where the leader listens and the name of the shared memory. Raises torch's DistStoreError."""
    store.wait([LEADER_ADDRESS], timedelta(seconds=timeout_s))
    path, identity = json.loads(store.get(LEADER_ADDRESS))
    return path, identity

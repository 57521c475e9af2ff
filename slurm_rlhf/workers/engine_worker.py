"""What the leader and the followers of an engine have in common."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.calls import SyncConnection, SyncGroupRequest, SyncReport
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.rollout.tp_group import EnginePlace
from slurm_rlhf.rollout.vllm_settings import prepare_environment
from slurm_rlhf.weight_sync.endpoints import EngineEnd
from slurm_rlhf.workers.worker import Role, Seat

MEETING = "meeting"
"""Key of the engine's store: where the leader listens, and what its shared memory is called."""


class EngineRank(Role):
    """A rank of the rollout role: an engine, or a TP rank of one. `prepare_process` comes first."""

    engine: Any

    def __init__(self, config: Config, seat: Seat, client: ControlClient) -> None:
        super().__init__(config, seat, client)
        self.place = EnginePlace.of(seat.rank, config.vllm.tensor_parallel_size, seat.node)
        self.sync = EngineEnd(config, f"{seat.role} {seat.rank}")

    def join_group(self, request: SyncGroupRequest) -> SyncConnection:
        """Join a weight transfer group as the rank that `request` names."""
        described = {name: value for name, value in asdict(request).items() if value is not None}
        parameters = described.pop("parameters")
        return SyncConnection(**self.sync.join(parameters, self.engine.describe(), **described))

    def receive_weights(self, version: int) -> SyncReport:
        """Take over policy `version`; requests in flight go on under it."""
        answer = self.sync.receive(version, self.engine.load_weights)
        return SyncReport(broken=answer.get("broken", ""), checksum_s=answer.get("checksum_s", 0.0))

    def close(self) -> None:
        if hasattr(self, "engine"):
            with _without_collecting():
                self.engine.close()


@contextmanager
def _without_collecting() -> Iterator[None]:
    """vLLM thaws what was frozen and collects all garbage twice while it ends, and the process ends right after it."""
    collect, gc.collect = gc.collect, lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


def prepare_process(config: Config, seat: Seat) -> None:
    """What has to be so before vLLM is imported: this engine's GPUs, and the variables that vLLM reads."""
    own_devices(seat.local_rank, config.vllm.tensor_parallel_size)
    prepare_environment()


def own_devices(local_rank: int, tp: int) -> None:
    """Leave only this engine's GPUs visible, TP rank i's as the i-th. Comes before CUDA is initialized."""
    first = local_rank - local_rank % tp
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = [device for device in os.environ.get(name, "").split(",") if device]
        if visible:
            os.environ[name] = ",".join(visible[first : first + tp])


def segment_prefix(config: Config, place: EnginePlace) -> str:
    """Beginning of the names of an engine's shared memory, the same for all runs that one run directory ever sees."""
    run = hashlib.blake2b(str(Path(config.run_dir).absolute()).encode(), digest_size=8).hexdigest()
    return f"slurm_rlhf.{run}.{place.engine}."


def publish_meeting(store: Any, config: Config, place: EnginePlace, path: str) -> str:
    """Leader: say where it listens. Removes shared memory of earlier starts of this run; answers the new name."""
    from slurm_rlhf.rollout.tp_group import unlink_segments

    prefix = segment_prefix(config, place)
    unlink_segments(prefix)
    identity = prefix + secrets.token_hex(8)
    store.set(MEETING, json.dumps([path, identity]))
    return identity


def read_meeting(store: Any, timeout_s: float) -> tuple[str, str]:
    """Follower: (where the leader listens, the engine's identity). Blocks; torch's DistStoreError at the time-out."""
    store.wait([MEETING], timedelta(seconds=timeout_s))
    path, identity = json.loads(store.get(MEETING))
    return path, identity

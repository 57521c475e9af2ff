"""The TP ranks of an engine: what all have in common, and the follower, which does what the leader says."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import secrets
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine.engine import Engine, GenerateRequest, backend
from slurm_rlhf.engine.tp_engine import EnginePlace, TpEngine, engine_store, unlink_segments
from slurm_rlhf.errors import RoleDied
from slurm_rlhf.ranks.follower_links import FollowerAnswer, FollowerCalls, LeaderMessage, LocalStream
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import SyncConnection, SyncReport
from slurm_rlhf.weights.ends import EngineEnd
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import SyncGroupRequest, WakeUpRequest
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.codec import calls_of, read
from slurm_rlhf.wire.messages import sendable

LEADER_ADDRESS = "leader_address"
"""Key of the engine's store; its value: where the leader listens, and the name of its shared memory."""


class EngineWorker(Worker):
    """Works as a TP rank of an engine. `prepare_process` comes before it is made."""

    engine: Engine

    def __init__(self, config: Config, info: RankInfo, client: ControlClient) -> None:
        super().__init__(config, info, client)
        tp = config.vllm.tensor_parallel_size
        self.place = EnginePlace(*divmod(info.rank, tp), tp, info.node)
        self.sync = EngineEnd(config, f"{info.role} {info.rank}")

    def join_group(self, request: SyncGroupRequest) -> SyncConnection:
        """Join a weight transfer group as the rank that `request` names."""
        return self.sync.join(request.parameters, self.engine.describe(), **request.described())

    def receive_weights(self, version: int) -> SyncReport:
        """Take over policy `version`; requests in flight go on under it."""
        return self.sync.receive(version, self.engine.load)

    def close(self) -> None:
        if hasattr(self, "engine"):
            # Libraries collect all garbage while they end, and thaw it before; the process ends right after it.
            gc.freeze()
            gc.unfreeze = gc.freeze
            self.engine.close()


def prepare_process(config: Config, info: RankInfo) -> None:
    """Set what the engine's library reads when it is imported: GPUs and environment variables; then import it."""
    own_devices(info.local_rank, config.vllm.tensor_parallel_size)
    backend(config).prepare_environment()
    backend(config).import_library()


def own_devices(local_rank: int, tp: int) -> None:
    """Leave only the GPUs of this engine visible, that of TP rank i as the i-th; before CUDA is initialized."""
    first = local_rank - local_rank % tp
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + tp])


def segment_prefix(config: Config, place: EnginePlace) -> str:
    """Return how the names of the engine's shared memory begin, the same for all runs in one run directory."""
    run = hashlib.blake2b(str(Path(config.run_dir).absolute()).encode(), digest_size=8).hexdigest()
    return f"slurm_rlhf.{run}.{place.engine}."


def publish_address(store: Any, config: Config, place: EnginePlace, path: str) -> str:
    """Leader: publish where it listens; remove shared memory of earlier starts and return its new name."""
    prefix = segment_prefix(config, place)
    unlink_segments(prefix)
    identity = prefix + secrets.token_hex(8)
    store.set(LEADER_ADDRESS, json.dumps([path, identity]))
    return identity


def read_address(store: Any, timeout_s: float) -> tuple[str, str]:
    """Follower: wait for the leader's address and the name of its shared memory. Raises torch's DistStoreError."""
    store.wait([LEADER_ADDRESS], timedelta(seconds=timeout_s))
    path, identity = json.loads(store.get(LEADER_ADDRESS))
    return path, identity


_MAY_FAIL = (FollowerCalls.sync_join.__name__, FollowerCalls.sync_receive.__name__)  # this rank goes on if they fail


class EngineFollower(EngineWorker):
    """Obeys the leader: it has the methods of `FollowerCalls`, and is no subclass, so that nobody else can call them.

    The conductor hears its heartbeats, and calls nothing but `shutdown`.
    """

    engine: TpEngine

    def __init__(self, config: Config, info: RankInfo, client: ControlClient) -> None:
        super().__init__(config, info, client)
        self._closed = False
        self._frames: SimpleQueue[LeaderMessage] = SimpleQueue()
        limit = config.timeout.connect
        self.store = engine_store(self.place, limit)
        path, self.identity = read_address(self.store, limit)
        try:
            self.stream = LocalStream(Client(path))
        except OSError as error:
            raise RoleDied(f"nobody listens at {path}: {error}") from error
        self.stream.send(self.place.tp_rank)
        self._leaving = False
        self.stream.listen(self._take, self._abandoned)

    def busy(self) -> bool:
        """Return True until the leader closes the engine."""
        return not self._closed

    def advance(self) -> None:
        """Obey the next message of the leader, once it comes."""
        message = self._frames.get()
        self._obey(message)
        self.client.phase = f"idle after {message.name}"

    def close(self) -> None:
        """Obey until the leader closes the engine: the conductor has called `shutdown` on all ranks at once."""
        while not self._closed:
            self.advance()

    def _obey(self, message: LeaderMessage) -> None:
        self.client.phase = message.name
        obedient: FollowerCalls = self
        try:
            spec = calls_of(FollowerCalls)[message.name]
            what = f"the argument of {spec.name}"
            arguments = [] if spec.argument is None else [read(spec.argument, message.argument, what)]
            result = getattr(obedient, spec.name)(*arguments)
        except Exception as error:
            self.stream.send(FollowerAnswer("failed", message.number, sendable(f"{type(error).__name__}: {error}")))
            if message.name == FollowerCalls.start.__name__:
                time.sleep(timeouts.FOLLOWER_S)
            if message.name not in _MAY_FAIL:
                raise
            return
        if spec.deadline is not None:
            self.stream.send(FollowerAnswer("done", message.number, result))

    def start(self) -> None:
        def report(batch: int, digest: bytes) -> None:
            self.stream.send(FollowerAnswer("planned", batch, digest))

        self.engine = TpEngine(self.config, self.place, self.store, self.identity, report)

    def add(self, request: GenerateRequest) -> None:
        self.engine.add(request)

    def step(self) -> None:
        self.engine.step()

    def drop(self) -> None:
        self.engine.drop()

    def check(self) -> bytes:
        return self.engine.tp_digest.digest()

    def sync_join(self, request: SyncGroupRequest) -> SyncConnection:
        return self.join_group(replace(request, rank=request.rank + self.place.tp_rank))

    def sync_receive(self, version: int) -> SyncReport:
        return self.receive_weights(version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake_up(self, request: WakeUpRequest) -> None:
        self.engine.wake(request.part)

    def leave(self) -> None:
        super().close()
        self._closed = True

    def _take(self, message: Any) -> None:
        taken: LeaderMessage = read(LeaderMessage, message, "a message of the leader")
        # Known from here on: the leader may be gone before this rank comes to that command.
        self._leaving = self._leaving or taken.leaving
        self._frames.put(taken)

    def _abandoned(self, error: Exception) -> None:
        """End this process: its leader is gone, and its main thread may never return from a collective."""
        if self._leaving:
            return
        print(f"{self.place}: its leader, rank {self.place.rank(0)}, is gone: {error}", file=sys.stderr, flush=True)
        os._exit(1)

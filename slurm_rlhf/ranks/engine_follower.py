"""A TP rank of an engine that is not its leader: it does what the leader says, in the same order."""

from __future__ import annotations

import os
import sys
import time
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.tp_engine import TpEngine, engine_store
from slurm_rlhf.ranks.engine_worker import EngineWorker, read_address
from slurm_rlhf.ranks.follower_links import EngineCommand, FollowerAnswer, FollowerCalls, LeaderMessage
from slurm_rlhf.ranks.local_stream import connect_local
from slurm_rlhf.ranks.worker import RankInfo
from slurm_rlhf.records import SyncConnection, SyncReport
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import SyncGroupRequest, SyncUpdateRequest, WakeUpRequest
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.codec import read
from slurm_rlhf.wire.declarations import calls_of
from slurm_rlhf.wire.messages import sendable

_MAY_FAIL = (FollowerCalls.sync_join.__name__, FollowerCalls.sync_receive.__name__)  # and this rank goes on


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
        self.stream = connect_local(path, limit)
        self.stream.send(self.place.tp_rank)
        self._leaving = False
        self.stream.listen(self._take, self._abandoned)

    def busy(self) -> bool:
        """Return True until the leader closes the engine."""
        return not self._closed

    def advance(self) -> None:
        """Obey the next message of the leader, once it comes."""
        message = self._frames.get()
        for command in message.commands:
            self._obey(message.number, command)
        self.client.phase = f"idle after {message.commands[-1].name}"

    def close(self) -> None:
        """Obey until the leader closes the engine: the conductor has called `shutdown` on all ranks at once."""
        while not self._closed:
            self.advance()

    def _obey(self, number: int, command: EngineCommand) -> None:
        self.client.phase = command.name
        obedient: FollowerCalls = self
        try:
            spec = calls_of(FollowerCalls)[command.name]
            what = f"the argument of {spec.name}"
            arguments = [] if spec.argument is None else [read(spec.argument, command.argument, what)]
            result = getattr(obedient, spec.name)(*arguments)
        except Exception as error:
            self.stream.send(FollowerAnswer("failed", number, sendable(f"{type(error).__name__}: {error}")))
            if command.name == FollowerCalls.start.__name__:
                time.sleep(timeouts.FOLLOWER_S)
            if command.name not in _MAY_FAIL:
                raise
            return
        if spec.deadline is not None:
            self.stream.send(FollowerAnswer("done", number, result))

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

    def sync_receive(self, request: SyncUpdateRequest) -> SyncReport:
        return self.receive_weights(request.version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake_up(self, request: WakeUpRequest) -> None:
        self.engine.wake(request.part)

    def leave(self) -> None:
        super().close()
        self._closed = True
        self.stream.close()

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

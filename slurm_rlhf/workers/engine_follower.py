"""A TP rank of an engine that is not its leader: it does what the leader says, in the same order."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.calls import SyncGroupRequest
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.declarations import read
from slurm_rlhf.records import SyncConnection
from slurm_rlhf.rollout.engine import GenerateRequest
from slurm_rlhf.rollout.tp_group import engine_store
from slurm_rlhf.workers.engine_worker import EngineWorker, read_address
from slurm_rlhf.workers.follower_links import WITH_ANSWER, connect_local
from slurm_rlhf.workers.worker import RankInfo

if TYPE_CHECKING:
    from slurm_rlhf.rollout.tp_engine import TpEngine

_GRACE_S = 5.0  # for the leader to report why the engine does not start, before the end of this rank does


class EngineFollower(EngineWorker):
    """Obeys the leader. The conductor hears its heartbeats, and calls nothing but `shutdown`."""

    engine: TpEngine

    def __init__(self, config: Config, info: RankInfo, client: ControlClient) -> None:
        super().__init__(config, info, client)
        self._closed = False
        self._frames: SimpleQueue[tuple[int, list[Any]]] = SimpleQueue()
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
        number, commands = self._frames.get()
        for name, arguments in commands:
            self._obey(number, name, arguments)
        self.client.phase = f"idle after {commands[-1][0]}"

    def close(self) -> None:
        """Obey until the leader closes the engine: the conductor has called `shutdown` on all ranks at once."""
        while not self._closed:
            self.advance()

    def _obey(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        self.client.phase = name
        try:
            result = getattr(self, f"do_{name}")(**arguments)
        except Exception as error:
            self.stream.send(["failed", number, f"{type(error).__name__}: {error}"])
            if name == "start":
                time.sleep(_GRACE_S)
            if name not in ("sync_join", "sync_receive"):
                raise
            return
        if name in WITH_ANSWER:
            self.stream.send(["done", number, result])

    def do_start(self) -> None:
        from slurm_rlhf.rollout.tp_engine import TpEngine

        def report(batch: int, digest: bytes) -> None:
            self.stream.send(["planned", batch, digest])

        self.engine = TpEngine(self.config, self.place, self.store, self.identity, report)

    def do_add(self, request: dict[str, Any]) -> None:
        self.engine.add(read(GenerateRequest, request, "a request of the leader"))

    def do_step(self) -> None:
        self.engine.step()

    def do_drop(self) -> None:
        self.engine.drop()

    def do_check(self) -> bytes:
        return self.engine.tp_digest.digest()

    def do_sync_join(self, request: dict[str, Any]) -> SyncConnection:
        leader: SyncGroupRequest = read(SyncGroupRequest, request, "the group of the leader")
        return self.join_group(replace(leader, rank=leader.rank + self.place.tp_rank))

    def do_sync_receive(self, version: int) -> dict[str, str]:
        broken = self.receive_weights(version).broken
        return {"broken": broken} if broken else {}

    def do_sleep(self) -> None:
        self.engine.sleep()

    def do_wake_up(self, part: str) -> None:
        self.engine.wake_up(part)

    def do_close(self) -> None:
        super().close()
        self._closed = True
        self.stream.close()

    def _take(self, frame: list[Any]) -> None:
        number, commands = frame
        # Known from here on: the leader may be gone before this rank comes to that command.
        self._leaving = self._leaving or commands[-1][0] == "close"
        self._frames.put((number, commands))

    def _abandoned(self, error: Exception) -> None:
        """End this process: its leader is gone, and its main thread may never return from a collective."""
        if self._leaving:
            return
        print(f"{self.place}: its leader, rank {self.place.rank(0)}, is gone: {error}", file=sys.stderr, flush=True)
        os._exit(1)

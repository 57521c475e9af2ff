"""Starts the engines of a job, knows which are starting, ready or gone, and calls those that are ready."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from slurm_rlhf.cluster.processes import raise_descriptors
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RemoteError
from slurm_rlhf.nodes.engine_launcher import EngineEnds, EngineLauncher, Environment
from slurm_rlhf.observe.log_tail import quoted
from slurm_rlhf.placement.rank_map import RankMap, TpGroup
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import EngineCalls, GenerateAnswer, GenerateBatch
from slurm_rlhf.wire.handles import ControlServer, EngineHandle
from slurm_rlhf.wire.messages import FAILURE, TERMINATION, Peer, Preemption

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answered:
    """Says that an engine has answered the call for a row, or failed it."""

    engine: int
    row: int
    call: Future[GenerateAnswer]


@dataclass(frozen=True, slots=True)
class Ready:
    """Says that an engine has started."""

    engine: int


@dataclass(frozen=True, slots=True)
class Gone:
    """Says that an engine is lost, and why."""

    engine: int
    why: str
    error: BaseException | None = None  # error of its start


News = Answered | Ready | Gone


@dataclass(slots=True)
class Fleet:
    """Starts the engines and reports what happens to them. One that ends, hangs or does not start ends no other.

    Used by one thread; what other threads learn comes to it through `_news`.
    """

    config: Config
    directory: RunDirectory
    ranks: RankMap
    launcher: EngineLauncher
    ready: list[int] = field(default_factory=list, init=False)
    gone: dict[int, Gone] = field(default_factory=dict, init=False)
    groups: dict[int, TpGroup] = field(default_factory=dict, init=False)
    _news: SimpleQueue[News] = field(default_factory=SimpleQueue, init=False)
    _called: set[int] = field(default_factory=set, init=False)  # engines that were asked to start
    _since: float = field(default=0.0, init=False)
    _server: ControlServer = field(init=False)
    _handle: EngineHandle = field(init=False)
    _preemption: Preemption = field(default_factory=Preemption, init=False)
    _ends: EngineEnds = field(default_factory=EngineEnds, init=False)

    def __post_init__(self) -> None:
        timeout, world = self.config.timeout, self.ranks.world(ROLLOUT)
        self.groups = {group.engine: group for group in self.ranks.tp_groups}
        raise_descriptors(world)
        self._server = ControlServer(
            RunKeys.create(self.directory.keys),
            host=self.launcher.address,
            heartbeat_interval=timeout.heartbeat_interval,
            heartbeat_limit=timeout.heartbeat,
            on_lost=lambda peer: self._tell_gone(peer, peer.lost),
            on_event=self._on_event,
        )
        width = self.config.vllm.tensor_parallel_size
        self._handle = EngineHandle(self._server, ROLLOUT, world, width, timeout)

    def start(self, environment: Environment) -> None:
        """Start the processes of all engines; does not wait for them."""
        self._since = time.monotonic()
        words = [
            f"--role={ROLLOUT}",
            f"--run_dir={self.directory.root}",
            f"--endpoint={self._server.endpoint()}",
        ]
        self.launcher.start(words, environment)

    @property
    def coming(self) -> list[int]:
        """List the engines that are neither ready nor gone."""
        return [engine for engine in self.groups if engine not in self.ready and engine not in self.gone]

    def ask(self, engine: int, row: int, batch: GenerateBatch) -> None:
        """Hand a row to an engine; the answer comes as news."""
        call = self._handle.call(engine, EngineCalls.generate, batch)
        call.add_done_callback(lambda done: self._news.put(Answered(engine, row, done)))

    def wait(self, seconds: float) -> list[News]:
        """Wait for news, at most `seconds`, and return all there is; nothing follows on the `Gone` of an engine."""
        self._look()
        found: list[News] = []
        try:
            found.append(self._news.get(timeout=seconds))
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            pass
        return [each for each in found if self._take(each)]

    def _take(self, news: News) -> bool:
        """Keep `ready` and `gone` up to date; return False for news that no longer matter."""
        if news.engine in self.gone:
            return False
        if isinstance(news, Answered) and ": EngineBroken: " in str(news.call.exception()):
            return False  # it ends by itself; its rows go to others then
        if isinstance(news, Ready):
            self.ready.append(news.engine)
        if isinstance(news, Gone):
            self.gone[news.engine] = news
            if news.engine in self.ready:
                self.ready.remove(news.engine)
            # It may hang, or its other ranks wait for it and hold the memory of its devices.
            self.launcher.end(news.engine)
            log.error("engine %d is lost: %s", news.engine, news.why)
        return True

    def give_up(self, engine: int, why: str) -> None:
        """Count an engine as lost although it answers."""
        self._news.put(Gone(engine, why))

    def _look(self) -> None:
        """Look for ranks that have arrived, and engines that have ended or are late."""
        for engine, how in self._ends.news(self.launcher.ended()):
            self._news.put(Gone(engine, f"{how}{self._last_words(engine)}"))
        here = {peer.rank for peer in self._server.peers(ROLLOUT)}
        late = time.monotonic() - self._since > self.config.timeout.connect
        for engine in self.groups.keys() - self._called - self.gone.keys():
            ranks = self.groups[engine].ranks
            if here.issuperset(ranks):
                self._called.add(engine)
                call = self._handle.call(engine, EngineCalls.start, 0)
                call.add_done_callback(partial(self._started, engine))
            elif late:
                self._called.add(engine)
                self._news.put(
                    Gone(
                        engine,
                        f"it did not say hello within {self.config.timeout.connect:g} s (timeout.connect)"
                        f"{self._last_words(engine)}",
                    )
                )

    def _started(self, engine: int, call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            self._news.put(Ready(engine))
            return
        self._news.put(Gone(engine, f"it did not start: {error}", error))
        if isinstance(error, RemoteError) and error.remote_traceback:
            log.error("engine %d:\n%s", engine, error.remote_traceback)

    def _last_words(self, engine: int) -> str:
        group = self.groups[engine]
        logs = [self.directory.role_log(ROLLOUT, group.node, rank) for rank in group.ranks]
        logs += [self.directory.role_log(ROLLOUT, group.node, f"{rank}.start") for rank in group.ranks]
        there = [path for path in logs if os.path.exists(path) and path.stat().st_size]
        if not there:
            return ""
        newest = max(there, key=lambda path: path.stat().st_mtime)
        return f". {quoted(newest, 6)}"

    def _tell_gone(self, peer: Peer, why: str) -> None:
        engine = peer.rank // self._handle.width
        self._news.put(Gone(engine, f"rank {peer.rank} on {peer.host} (pid {peer.pid}): {why}"))

    def _on_event(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        if event == FAILURE:
            self._ends.said(peer.rank // self._handle.width, str(data.get("reason")))
        elif event == TERMINATION:
            there = [each for each in self._server.peers(ROLLOUT) if each.rank // self._handle.width not in self.gone]
            self._preemption.note(peer, there, len(there))

    def stop(self) -> None:
        """End every engine: ask, then end by force what is left."""
        half = self.config.timeout.shutdown / 2
        self.launcher.stop(self._all_leave(half), half)
        self._server.close()
        self.directory.keys.unlink(missing_ok=True)

    def _all_leave(self, seconds: float) -> bool:
        """Ask all ranks of the engines that are ready to end; return True if nothing is left to be ended by force."""
        calls = [self._handle.shut_down(rank) for engine in self.ready for rank in self.groups[engine].ranks]
        _, left = wait(calls, seconds)
        return not left and not self.coming and not self.gone
